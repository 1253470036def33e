"""The data of a run as batches: opened, logged and indexed on every rank, the same samples on all."""

from __future__ import annotations

from typing import Any

from megatron.callbacks.context import Batches, NamedSet
from megatron.checkpoint.agreement import gather, together
from megatron.data.loader import StepLoader
from megatron.data.order.datasets import SET, DataPlan, Datasets
from megatron.data.order.saved_order import SavedOrder
from megatron.data.sample import SampleDataset
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.run.data import collate_rules, open_data
from megatron.run.data_table import data_lines, evaluation_notes
from megatron.training.callback import Callback
from megatron.training.setup import Process

logger = get_logger(__name__)


class DataOrder(Callback):
    """Saves the sample order with each checkpoint; `data.resume_order` finds it by this class name."""

    def __init__(self, plan: DataPlan) -> None:
        self.plan = plan

    def state_dict(self) -> dict[str, Any]:
        return self.plan.state()


def open_data_on_ranks(args: NeoXArgs, process: Process, order: SavedOrder | None, done: tuple[int, int]) -> DataPlan:
    """Open and count the data, refuse what does not agree with its manifest and tokens of another tokenizer, log the
    table.

    Args:
        order, done: see `open_data`.
    """
    with together("opening the data", process.state):
        plan = open_data(args, process.tokenizer, order, done)
        if process.state.rank == 0:
            plan.check_content()
            plan.check_tokenizer(process.tokenizer)
    if process.state.rank == 0:
        tokenizer, masked = process.tokenizer, args.model.intra_document_masking
        logger.info(f"tokenizer {tokenizer.describe()}: {tokenizer.vocab_size} tokens, end of document {tokenizer.eod}")
        logger.info(
            f"samples of {args.model.seq_length} inputs and as many targets, the same shifted by one token; attention "
            + ("stays inside a document" if masked else "crosses documents (intra_document_masking: true stops it)")
        )
        for line in data_lines(plan.table()):
            logger.info(line)
        for note in [*plan.notes(), *evaluation_notes(plan, args.training.eval_iters)]:
            logger.info(note)
    return plan


def build_batches(args: NeoXArgs, process: Process, plan: DataPlan) -> dict[str, Batches]:
    """`batches[role](consumed)` for each role of the plan. Builds the index arrays, once per file system."""
    first = process.state.rank == 0
    with together("building the sample index", process.state):
        if first:
            datasets = plan.build(mmap_warmup=args.data.mmap_warmup)
    with together("reading the sample index", process.state):
        if not first:
            datasets = plan.build(mmap_warmup=False)
    if datasets.train is None and args.training.train_iters:
        raise UserError("there is no training data: check data_path and split, or train_data_paths, or mixture")
    agree_on_data(datasets, process.state, args.data.use_shared_fs)
    rules = collate_rules(args, process.tokenizer)

    def loader(dataset: SampleDataset) -> StepLoader:
        return StepLoader(
            dataset,
            micro_batch=args.training.train_micro_batch_size_per_gpu,
            gas=args.training.gradient_accumulation_steps,
            rules=rules,
            dp_rank=process.state.dp_rank,
            dp_size=process.state.dp_size,
            num_workers=args.data.num_workers,
            pin_memory=process.state.device.type == "cuda",
        )

    return {role: loader(dataset).steps for role, dataset in datasets.by_role().items()}


def named_sets(plan: DataPlan, batches: dict[str, Batches]) -> list[NamedSet]:
    """The named validation sets with their batches."""
    return [NamedSet(one.name, one.tags, one.steps, batches[f"{SET}{one.name}"]) for one in plan.sets]


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
