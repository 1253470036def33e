"""The data of a run as batches: opened, logged and indexed on every rank, the same samples on all."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.callbacks.context import Batches, NamedSet
from megatron.checkpoint.agreement import broadcast, gather, together
from megatron.data.copies import CudaCopies, copy_ahead
from megatron.data.loader import StepLoader
from megatron.data.order.data_plan import SET, DataPlan, Datasets
from megatron.data.order.saved_order import SavedOrder
from megatron.data.reference import ReferenceStore, WithReference
from megatron.data.sample import SampleDataset
from megatron.data.tokens.indexed import identify
from megatron.errors import UserError
from megatron.log import DETAIL, get_logger
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.rules_rollouts import trains_on_rollouts
from megatron.run.data import collate_rules, open_data, resolve_epochs
from megatron.run.data_table import data_lines, evaluation_notes
from megatron.run.reference_point import ReferencePoint
from megatron.tokenizer.base import Tokenizer
from megatron.training.callback import Callback
from megatron.training.engine import StepOut
from megatron.training.setup import Process, build_objective
from megatron.training.trainer import Trainer

logger = get_logger(__name__)


class DataOrder(Callback):
    """Saves the sample order with each checkpoint; `data.resume_order` finds it by this class name."""

    def __init__(self, plan: DataPlan) -> None:
        self.plan, self.step = plan, plan.start[0]

    def loaded(self, trainer: Trainer) -> None:
        self.step = trainer.step

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        self.step = trainer.step

    def state_dict(self) -> dict[str, Any]:
        return self.plan.state(self.step)


def share_epochs(process: Process) -> NeoXArgs:
    """The configuration with `train_epochs` as `train_iters`, for which rank 0 counts the data. Collective."""
    args, state = process.args, process.state
    if not args.training.train_epochs:
        return args
    with together("counting the data", state):
        if state.rank == 0:
            args = resolve_epochs(args, process.tokenizer)
    return broadcast(args, state)


def open_data_on_ranks(args: NeoXArgs, process: Process, order: SavedOrder | None, done: tuple[int, int]) -> Datasets:
    """Open and count the data, refuse what does not agree with its manifest and tokens of another tokenizer, log the
    table; build the index arrays.

    Rank 0 does that. The others get what it found, and open a file when they read the first sample of it: a thousand
    ranks that each look at every file are more than a file system bears. Where index arrays are not on a file system
    that all see, every rank does it.

    Args:
        order, done: see `open_data`.
    """
    state, first = process.state, process.state.rank == 0
    found: Datasets | None = None
    with together("opening the data", state):
        if first:
            plan = open_data(args, process.tokenizer, order, done)
            plan.check_content()
            plan.check_tokenizer(process.tokenizer)
            _ = plan.turn_ends, plan.files  # what the others are told
            _log_data(args, process.tokenizer, plan)
    with together("building the sample index", state):
        if first:
            found = plan.build(mmap_warmup=args.data.mmap_warmup)
    alike = broadcast(found if found is not None and args.data.use_shared_fs and plan.caches.stored else None, state)
    if alike is not None:
        found = found or alike
        compare_copies(found, state)
    else:
        with together("reading the sample index", state):
            found = found or open_data(args, process.tokenizer, order, done).build()
        agree_on_data(found, state, args.data.use_shared_fs)
    if found.train is None and args.training.train_iters and not trains_on_rollouts(args.get):
        raise UserError("there is no training data: check data_path and split, or train_data_paths, or mixture")
    return found


def _log_data(args: NeoXArgs, tokenizer: Tokenizer, plan: DataPlan) -> None:
    masked = args.model.intra_document_masking
    logger.log(
        DETAIL, f"tokenizer {tokenizer.describe()}: {tokenizer.vocab_size} tokens, end of document {tokenizer.eod}"
    )
    logger.log(
        DETAIL,
        f"samples of {args.model.seq_length} inputs and as many targets, the same shifted by one token; attention "
        + ("stays inside a document" if masked else "crosses documents (intra_document_masking: true stops it)"),
    )
    for line in data_lines(plan.table()):
        logger.log(DETAIL, line)
    for note in [*plan.notes(), *evaluation_notes(plan, args.training.eval_iters)]:
        logger.info(note)


def build_batches(
    args: NeoXArgs,
    process: Process,
    datasets: Datasets,
    reference: ReferenceStore | None = None,
    point: ReferencePoint | None = None,
) -> dict[str, Batches]:
    """`batches[role](consumed, step)` for each role: batches of the training data are those of the plan. Samples have
    their log-probabilities in `reference`, which need not be there yet, and batches the z0 of `point`."""
    objective = build_objective(args)
    rules = replace(collate_rules(args, process.tokenizer), reads=objective.reads)

    device = process.state.device
    copies = CudaCopies(device) if device.type == "cuda" else None

    compared = datasets.compared().keys() | {"train"}

    def steps(role: str, dataset: SampleDataset) -> Batches:
        loader = StepLoader(
            dataset if reference is None or role not in compared else WithReference(dataset, reference),
            micro_batch=args.training.train_micro_batch_size_per_gpu,
            gas=args.training.gradient_accumulation_steps,
            rules=rules,
            dp_rank=process.state.dp_rank,
            dp_size=process.state.dp_size,
            num_workers=args.data.num_workers,
            pin_memory=copies is not None,
            plan=BatchPlan.of(args) if role == "train" else None,
            rows=1 if role not in datasets.plan.roles else datasets.plan.roles[role].rows,  # every step may forget
            count=objective.count,
            problem=objective.problem,
        )
        if copies is None:
            return loader.steps
        return lambda consumed=0, step=None: copy_ahead(loader.steps(consumed, step), copies)

    found = {role: steps(role, dataset) for role, dataset in datasets.by_role().items()}
    for role, dataset in point.exchanged.items() if point is not None else ():
        found[role] = point.add_to(found[role], steps(role, dataset))
    return found


def named_sets(plan: DataPlan, batches: dict[str, Batches]) -> list[NamedSet]:
    """The named validation sets with their batches."""
    return [NamedSet(one.name, one.tags, one.steps, batches[f"{SET}{one.name}"]) for one in plan.sets]


def compare_copies(datasets: Datasets, state: ParallelState) -> None:
    """Raise `UserError` on every rank when a machine has other files than rank 0, for instance an old copy.

    The first rank of each machine looks at all of them; only a sample of each is read.
    """
    hosts = gather(socket.gethostname(), state)
    with together("comparing the data", state):
        if 0 < state.rank == hosts.index(hosts[state.rank]):
            others = [path for path, *_ in datasets.plan.files if not Path(path).is_file()]
            others = others or [one[0] for one in datasets.plan.files if identify(Path(one[0])) != one]
            if others:
                raise UserError(
                    f"{', '.join(others[:8])} on {hosts[state.rank]}: missing, or other data than rank 0 reads. Copy "
                    "the same .bin/.idx files to every node"
                )


def agree_on_data(datasets: Datasets, state: ParallelState, shared: bool) -> None:
    """Raise `UserError` on every rank when one would read other samples, for instance an old copy on one node.

    Index arrays are compared where each node has its own; in a shared folder they are the same files.
    """
    digests = gather(datasets.digest(arrays=not shared), state)
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        raise UserError(
            f"rank {shown} read other data than rank 0: the .bin/.idx files of a data path (or their index "
            "caches) differ between nodes. Copy the same files to every node and remove their index_cache folders."
        )
