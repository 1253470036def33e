"""What a run reads, worked out from its configuration: the same for ranks, for the dry run and for `--prepare`.

Imports no torch, but to read a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.find import Start
from megatron.data.build import DataPlan, epoch_samples, plan_datasets
from megatron.data.collate import CollateRules
from megatron.data.phases import Progress
from megatron.data.splits import sample_counts
from megatron.data.token_files import with_eod
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.tokenizer.base import Tokenizer


def with_epochs(args: NeoXArgs, tokenizer: Tokenizer) -> NeoXArgs:
    """`train_epochs` turned into `train_iters`, which needs the size of the data."""
    if args.training.train_iters is not None or not args.training.train_epochs:
        return args
    samples = epoch_samples(with_eod(args.data, tokenizer.eod), args.model.seq_length)
    return derive(args, Facts(tokenizer.vocab_size, args.parallel.world_size, epoch_samples=samples))


def data_plan(
    args: NeoXArgs,
    tokenizer: Tokenizer,
    frozen: Mapping[str, Any] | None = None,
    done: tuple[int, int] = (0, 0),
) -> DataPlan:
    """Open and count the data of a derived config. Raises `UserError` for missing, damaged or too little data.

    Args:
        frozen: sample order of the run that goes on.
        done: steps taken and samples consumed by it so far; its batches may have been larger than those to come.
    """
    training = args.training
    train_samples, valid_samples, test_samples = sample_counts(
        train_iters=training.train_iters or 0,
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iters,
        train_batch_size=training.train_batch_size,
    )
    train_samples = max(train_samples, done[1] + train_samples - done[0] * training.train_batch_size)
    return plan_datasets(
        with_eod(args.data, tokenizer.eod),
        seq_length=args.model.seq_length,
        seed=training.seed,
        train_samples=train_samples if training.do_train is not False else 0,
        valid_samples=valid_samples if training.do_valid is not False else 0,
        test_samples=test_samples if training.do_test is not False else 0,
        set_samples=test_samples if training.do_valid is not False else 0,  # each validation set, every time
        progress=Progress(training.train_batch_size, *done),
        frozen=frozen,
    )


def collate_rules(args: NeoXArgs, tokenizer: Tokenizer) -> CollateRules:
    """How the samples of a run become the arrays of a step."""
    return CollateRules(
        seq_length=args.model.seq_length,
        eod=tokenizer.eod,
        eod_mask_loss=args.data.eod_mask_loss,
        intra_document_masking=args.model.intra_document_masking,
        vocab_size=tokenizer.vocab_size,
    )


def frozen_order(start: Start) -> dict[str, Any] | None:
    """The sample order kept in the checkpoint that is continued; a finetune start makes its own. Imports torch."""
    if start.path is None or not start.load_optim:
        return None
    from megatron.checkpoint.reader import CheckpointReader

    return CheckpointReader(start.path).state()["client"].get("callbacks", {}).get("DataOrder")
