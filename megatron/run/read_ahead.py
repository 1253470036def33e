"""What another model says of the samples that a run will read, worked out in a pass over them before its first step.

It is kept (`data/reference.py`) in a folder that is named by the weights and by what else the numbers depend on. A pass
that was interrupted goes on where it was, and a run that is resumed finds everything.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.agreement import broadcast, together
from megatron.checkpoint.attempt import free_bytes
from megatron.data.batch import StepBatch
from megatron.data.loader import StepLoader
from megatron.data.order.data_plan import Datasets
from megatron.data.order.mixture import ReadOnce
from megatron.data.reference import ReferenceStore, Selected, StoreWriter, row_key, rows_of
from megatron.data.sample import SampleDataset
from megatron.data.tokens.cache import content_key
from megatron.errors import MachineError, NumericsError, UserError
from megatron.files import read_json, write_atomically
from megatron.log import get_logger, progress
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.forget_steps import TRAIN
from megatron.run.data import collate_rules
from megatron.tokenizer.base import Tokenizer
from megatron.training.partition_comm import all_gather

EXCHANGED = " with other answers"
COMMIT_SECONDS = 30.0  # how much of a pass is lost at most

logger = get_logger(__name__)

Missing = dict[str, list[int]]
"""By role, the numbers of the items of which a row is not there."""
Says = Callable[[StepBatch], Tensor | None]
"""What the model says of each target of a batch, `[gas, b, s, ...]`, on the ranks of the last stage; None elsewhere."""


class ReadAhead:
    """The rows of `store` for everything that a run will read.

    Args:
        compared: the samples by role, those with exchanged answers as role and `EXCHANGED`.
        begun: samples of the training data that the run has read.
        what: the rows, for messages.
    """

    def __init__(
        self,
        args: NeoXArgs,
        tokenizer: Tokenizer,
        datasets: Datasets,
        compared: Mapping[str, SampleDataset],
        begun: int,
        store: ReferenceStore,
        what: str,
    ) -> None:
        self.args, self.tokenizer, self.datasets, self.begun = args, tokenizer, datasets, begun
        self.compared, self.store, self.what = compared, store, what

    def missing(self, state: ParallelState) -> Missing:
        """What the run will read and the store does not have. Collective: rank 0 looks.

        Raises `MachineError` where it will not fit on the disk.
        """
        missing = Missing()
        with together(f"looking for {self.what}", state):
            if state.rank == 0:
                missing = self._missing()
                self._check_room(missing)
        missing = broadcast(missing, state)
        if not missing:
            logger.info(f"{self.what} are in {self.store.folder}")
        return missing

    def fill(
        self, missing: Missing, state: ParallelState, says: Says, beat: Callable[[], None], described: dict[str, Any]
    ) -> None:
        """Make these rows. Collective. `described`: the model, for people who look into the folder."""
        for role, numbers in missing.items():
            self._pass(role, numbers, state, says, beat, described)

    def finish(self, state: ParallelState) -> None:
        """Behind `fill`: every rank sees the rows. Collective."""
        self.store.refresh()
        with together(f"reading {self.what}", state):
            if not len(self.store):
                raise UserError(f"{self.store.folder} is not on a file system that all nodes see; set reference_path")
            if state.rank == 0:
                self._note_whole(self._wanted())

    def _wanted(self) -> dict[str, range]:
        """The items that the run will read, by role."""
        plan = self.datasets.plan
        begun = {TRAIN: self.begun} if plan.counts is None else plan.counts.taken
        return {
            name: range(begun.get(_role(name), 0), min(len(dataset), plan.roles[_role(name)].samples))
            for name, dataset in self.compared.items()
        }

    def _missing(self) -> Missing:
        """What the run will read and the store does not have. A store that was found whole is not looked through again
        for the same order of the data."""
        wanted = self._wanted()
        if self._found_whole(wanted):
            return {}
        found: Missing = {}
        for name, dataset in self.compared.items():
            numbers = progress(wanted[name], what=f"looking for {self.what}: {name}", unit="sample")
            if lacking := self.store.missing(dataset, numbers):
                found[name] = lacking
        if not found:
            self._note_whole(wanted)
        return found

    def _check_room(self, missing: Missing) -> None:
        """Raise `MachineError` where the rows will not fit on the disk."""
        rows = sum(len(numbers) * self.datasets.plan.roles[_role(name)].rows for name, numbers in missing.items())
        needed, free = rows * self.store.row_bytes, free_bytes(self.store.folder)
        if free < needed:
            raise MachineError(
                f"{self.what} need {needed} bytes; {free} are free in "
                f"{self.store.folder}. Make room, or set reference_path to a folder on a larger disk"
            )

    @property
    def _note(self) -> Path:
        """Where it is noted which items of this order of the data the store was found to have."""
        exchanged = [dataset.digest() for name, dataset in self.compared.items() if _role(name) != name]
        order = content_key({"order": self.datasets.digest(), "exchanged": exchanged})
        return self.store.folder / f"whole-{order[:16]}.json"

    def _found_whole(self, wanted: Mapping[str, range]) -> bool:
        """Whether it was, for all of these items, and has lost no row since."""
        known: dict[str, Any] = {}
        with suppress(OSError, UserError):
            known = read_json(self._note)
        ranges = {name: known.get(name, [0, 0]) for name in wanted}
        there = all(ranges[name][0] <= one.start and one.stop <= ranges[name][1] for name, one in wanted.items())
        return there and len(self.store) >= known.get("rows", 0)

    def _note_whole(self, wanted: Mapping[str, range]) -> None:
        found = {name: [one.start, one.stop] for name, one in wanted.items()}
        with suppress(OSError):  # then the next start looks again
            write_atomically(self._note, json.dumps({**found, "rows": len(self.store)}))

    def _pass(
        self,
        role: str,
        numbers: list[int],
        state: ParallelState,
        says: Says,
        beat: Callable[[], None],
        described: dict[str, Any],
    ) -> None:
        """Rows of items, written by the rank of the last stage that is first in all else."""
        args = self.args
        micro, rows = args.training.train_micro_batch_size_per_gpu, self.datasets.plan.roles[_role(role)].rows
        batch = micro * state.dp_size
        dataset, steps = self.compared[role], -(-len(numbers) // batch)
        loader = StepLoader(
            ReadOnce(Selected(dataset, numbers), len(numbers), steps * batch),
            micro_batch=micro,
            gas=1,
            rules=collate_rules(args, self.tokenizer),
            dp_rank=state.dp_rank,
            dp_size=state.dp_size,
            num_workers=args.data.num_workers,
            rows=rows,
        )
        writes = state.is_last_stage and state.tp_rank == 0 and state.dp_rank == 0
        writer = RowsWriter(self.store.folder, described, self.what) if writes else None
        batches, what = loader.steps(), f"{self.what}: {role}"
        for step in progress(range(steps), what=what, unit="batch") if state.rank == 0 else range(steps):
            beat()
            found = says(next(batches))
            values = None if found is None or state.tp_rank else _gather_data(found[0], state)
            if writer is not None and values is not None:
                writer.write(dataset, numbers[step * batch : (step + 1) * batch], values, rows)
        with together(f"writing {self.what}", state):
            if writer is not None:
                writer.close()


class RowsWriter:
    """Writes what a pass gives. `described`: the model; `what`: the rows, for messages."""

    def __init__(self, folder: Path, described: dict[str, Any], what: str) -> None:
        self._what = what
        name = f"{time.time_ns():x}-{os.uname().nodename}-{os.getpid()}"
        self._writer, self._committed = StoreWriter(folder, name), time.monotonic()
        write_atomically(folder / "model.json", json.dumps(described, indent=1))

    def write(self, dataset: SampleDataset, numbers: list[int], values: Tensor, rows: int) -> None:
        """`values` `[items * rows, s, ...]` of items, perhaps with more rows that fill the batch up."""
        host = values.cpu().numpy()
        for k, number in enumerate(numbers):
            item = dataset[number]
            for row, sample in enumerate(item if isinstance(item, tuple) else (item,)):
                if rows_of(sample):
                    self._writer.add(row_key(sample), host[k * rows + row])
        if not bool(torch.isfinite(values).all()):
            raise NumericsError(f"{self._what} are not finite")
        if time.monotonic() - self._committed > COMMIT_SECONDS:
            self._writer.commit()
            self._committed = time.monotonic()

    def close(self) -> None:
        self._writer.close()


def _gather_data(values: Tensor, state: ParallelState) -> Tensor:
    """`values` `[n, ...]` of all data ranks, `[data ranks * n, ...]`."""
    group, size = state.group("data"), state.dp_size
    if group is None:
        return values
    found = values.new_empty((size * len(values), *values.shape[1:]))
    all_gather(found, values.contiguous(), group=group)
    return found


def _role(name: str) -> str:
    """The role of what is compared."""
    return name.removesuffix(EXCHANGED)
