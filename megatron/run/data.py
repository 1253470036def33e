"""The data of a run, from its configuration and its checkpoint: the same for ranks, dry run and `--prepare`.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.init_from import advise_new_run
from megatron.checkpoint.start import Start
from megatron.checkpoint.tokenizer_identity import check_tokenizer
from megatron.data.collate import CollateRules
from megatron.data.order.by_step import SourceCounts
from megatron.data.order.data_plan import DataPlan
from megatron.data.order.datasets import epoch_samples, plan_datasets
from megatron.data.order.phases import Progress
from megatron.data.order.saved_order import SavedOrder
from megatron.data.order.splits import sample_counts
from megatron.data.tokens.cache import index_folder
from megatron.data.tokens.token_files import with_eod
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.forget_steps import FORGET, RETAIN, TRAIN
from megatron.neox_arguments.rules_rollouts import trains_on_rollouts
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.model_tokens import add_trained_ends


def resolve_epochs(args: NeoXArgs, tokenizer: Tokenizer) -> NeoXArgs:
    """`args` with `train_epochs` as `train_iters`, which needs the size of the data."""
    if args.training.train_iters is not None or not args.training.train_epochs:
        return args
    samples = epoch_samples(with_eod(args.data, tokenizer.eod), args.model.seq_length)
    return derive(args, Facts(tokenizer.vocab_size, args.parallel.world_size, epoch_samples=samples))


def open_data(
    args: NeoXArgs,
    tokenizer: Tokenizer,
    order: SavedOrder | None = None,
    done: tuple[int, int] = (0, 0),
) -> DataPlan:
    """Open and count the data of a derived config. Raises `UserError` for missing, damaged or too little data.

    Args:
        order: sample order of the run that is resumed.
        done: its steps and samples so far; its batches may have been larger than those to come.
    """
    training, first = args.training, order.start if order is not None else (0, 0)
    batches, steps = BatchPlan.of(args), training.train_iters or 0
    counts = _source_counts(args, order, done, batches)
    train_samples, valid_samples, test_samples = sample_counts(
        train_iters=steps,
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iters,
        train_batch_size=training.train_batch_size,
        train_samples=batches.samples(steps),
    )
    to_come = train_samples - batches.samples(done[0])
    if counts is not None:
        train_samples = counts.before(steps, TRAIN)
    else:
        # A run initialised from another's checkpoint did not take the earlier steps, or not from these samples.
        train_samples = done[1] + to_come if first != (0, 0) else max(train_samples, done[1] + to_come)
    return plan_datasets(
        with_eod(args.data, tokenizer.eod),
        seq_length=args.model.seq_length,
        seed=training.seed,
        train_samples=train_samples if training.do_train is not False and not trains_on_rollouts(args.get) else 0,
        valid_samples=valid_samples if training.do_valid is not False else 0,
        test_samples=test_samples if training.do_test is not False else 0,
        set_samples=test_samples if training.do_valid is not False else 0,  # each validation set, every time
        progress=Progress(training.train_batch_size, *done, first, batches),
        saved=order,
        counts=counts,
        unlearning=_unlearning_data(args) if training.do_train is not False else {},
    )


def _source_counts(
    args: NeoXArgs, order: SavedOrder | None, done: tuple[int, int], batches: BatchPlan
) -> SourceCounts | None:
    """What steps take from which role, in a run that unlearns, or did so before."""
    taken = order.taken if order is not None else {}
    if batches.forget is None and taken.get(TRAIN, done[1]) == done[1]:
        return None
    step, consumed = done
    return SourceCounts(batches, step, taken or {TRAIN: consumed}, args.training.train_iters or step)


def _unlearning_data(args: NeoXArgs) -> dict[str, dict[str, str]]:
    """The roles besides train that steps read: paths of their tokens and labels."""
    data = args.data
    found = {FORGET: {"path": data.ga_dataset, "labels": data.ga_label_dataset}}
    if args.post.gd_mode:
        found[RETAIN] = {"path": data.gd_retain_dataset, "labels": data.gd_retain_label_dataset}
    given = {name: {key: path for key, path in paths.items() if path is not None} for name, paths in found.items()}
    return given if data.ga_dataset is not None else {}


def collate_rules(args: NeoXArgs, tokenizer: Tokenizer) -> CollateRules:
    """How the samples of a run become the arrays of a step."""
    return CollateRules(
        seq_length=args.model.seq_length,
        eod=tokenizer.eod,
        eod_mask_loss=args.data.eod_mask_loss,
        intra_document_masking=args.model.intra_document_masking,
        vocab_size=tokenizer.vocab_size,
    )


def resume_order(start: Start, load: str | None) -> tuple[SavedOrder, tuple[int, int]]:
    """The sample order that a run continues, and its steps and samples so far.

    Empty and (0, 0) for a run that begins. `load`: the run's key, for a message about what changed.

    Raises `UserError` when `init_from` asks for an order that is missing.
    """
    if start.checkpoint is None or start.kind == "finetune":
        return SavedOrder(), (0, 0)
    saved = start.checkpoint.manifest
    order = start.checkpoint.callbacks.get("DataOrder") if start.load_data else None
    if start.init is not None and start.load_data and order is None:
        raise UserError(
            f"init_from: {start.checkpoint.path} has no sample order (it was converted, or trained without data), so "
            "its data cannot be continued; set init_from.data=restart"
        )
    found, done = SavedOrder.read(order), (saved.step, saved.consumed)
    if start.init is not None:
        done = start.init.first_step(saved), start.init.consumed(saved)
        found = found.inherit(saved.step, done)
    remedy = advise_new_run(start.checkpoint.path, ["data: restart"], load)
    return replace(found, remedy=f"For a new order of the data, {remedy}."), done


def reference_folder(args: NeoXArgs, plan: DataPlan) -> Path:
    """Where the folders of references are: `reference_path`, or `save`, or beside the training data's index."""
    named = args.post.reference_path or args.checkpoint.save
    if named is not None:
        return Path(named).expanduser()
    source = next(iter(plan.roles.values())).sources[0].source
    return index_folder(source.data.prefix, args.data.use_shared_fs, args.data.data_cache_path)


def note_trained_ends(args: NeoXArgs, plan: DataPlan) -> NeoXArgs:
    """`args` with the ends of turns that the chats among the training data teach, for checkpoints and exports."""
    tokens = add_trained_ends(args.tokenizer.model_tokens, plan.turn_ends)
    return args if tokens == args.tokenizer.model_tokens else args.replace("the training data", model_tokens=tokens)


def check_saved_tokenizer(start: Start, tokenizer: Tokenizer, allow: bool) -> None:
    """Refuse a checkpoint whose tokenizer is not this one; `allow` (`allow_config_changes`): only warn."""
    if start.checkpoint is not None:
        check_tokenizer(start.checkpoint, tokenizer, allow)
