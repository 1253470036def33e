"""Tokens, samples and epochs per data source, for training, validation and test."""

from __future__ import annotations

from megatron.data.build import DataPlan, SourceRow, plan_datasets
from megatron.data.splits import sample_counts
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer.base import Tokenizer


def data_table(args: NeoXArgs, tokenizer: Tokenizer) -> list[SourceRow]:
    """One row per role and source of a derived config. Raises `UserError` for missing, foreign or too little data."""
    plan = data_plan(args)
    plan.check_tokenizer(tokenizer)
    return plan.table()


def data_plan(args: NeoXArgs) -> DataPlan:
    """What the run of a derived config will read. Raises `UserError` for missing, damaged or too little data."""
    training = args.training
    counts = sample_counts(
        train_iters=training.train_iters or 0,
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iters,
        train_batch_size=training.train_batch_size,
    )
    active = (training.do_train, training.do_valid, training.do_test)
    train, valid, test = (samples if does else 0 for samples, does in zip(counts, active, strict=True))
    return plan_datasets(
        args.data,
        seq_length=args.model.seq_length,
        seed=training.seed,
        train_samples=train,
        valid_samples=valid,
        test_samples=test,
    )
