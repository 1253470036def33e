"""Work that rank 0 leads: it decides and has the results, every rank takes part.

The ranks talk over a group of their own that waits as long as it takes: rank 0 may be reading a data set, computing
metrics, or waiting for a user to type. Its failure ends the others instead of leaving them waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.errors import DeepyError
from megatron.inference.lockstep import Stopped
from megatron.inference.stage import Stage
from megatron.mpu.state import ParallelState

T = TypeVar("T")
PATIENCE = timedelta(days=30)


class Control:
    """How rank 0 talks to the others. Building it is collective over all ranks."""

    def __init__(self, state: ParallelState) -> None:
        self.state = state
        self.world_size = state.topology.world_size
        # gloo on every device: NCCL's watchdog would end a job that waits ten minutes for its user.
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if self.world_size > 1 else None

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in order, on rank 0; an empty list elsewhere."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.state.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def part(self) -> None:
        """Wait for all ranks: nobody leaves while another still reads what it sent."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def on_rank_zero(self, function: Callable[[], T]) -> T:
        """What `function` returns on rank 0, on every rank; a `DeepyError` that it raises is raised on every rank."""
        outcome: Any = None
        if self.state.rank == 0:
            try:
                outcome = function()
            except DeepyError as error:
                outcome = error
        outcome = self.broadcast(outcome)
        if isinstance(outcome, DeepyError):
            self.part()
            raise outcome
        return outcome


# Does a share of a job on one copy of the model: (items, options) -> one answer per item.
Worker = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Any]]


def share_out(
    control: Control, stage: Stage, work: Callable[[Sequence[Any]], Sequence[Any]], items: Callable[[], Sequence[Any]]
) -> list[Any] | None:
    """What `work` makes of the items that rank 0 has, in order, on every rank; None where some rank was asked to stop.

    `work`: see `Worker`, without options.
    """
    found: list[Any] | None = None
    team = Team(control, stage, {"work": lambda mine, options: work(mine)})

    def lead() -> None:
        nonlocal found
        with suppress(Stopped):
            found = team.ask("work", items(), {})

    team.run(lead)
    return control.broadcast(found)


class Team:
    """All ranks of a job around one model: `team.run(lead)` on every rank runs `lead()` on rank 0, which may `ask`.

    Args:
        stage: this rank's part of the model.
        workers: what can be asked for, by name; every rank of a copy calls it with the same items. Only the copy's
            rank with the results need return answers.

    Attributes:
        broken: a rank failed while all were at work: the others wait for it, and only the job's end can end them.
    """

    def __init__(self, control: Control, stage: Stage, workers: Mapping[str, Worker]) -> None:
        self.control = control
        self.stage = stage
        self.workers = workers
        self.broken = False

    def run(self, lead: Callable[[], None]) -> None:
        """Run `lead` on rank 0 while the other ranks do what it asks for.

        What ranks are asked may end by `Stopped` on all of them; rank 0's `ask` raises it.
        """
        if self.stage.state.rank == 0:
            try:
                lead()
            finally:
                if not self.broken:
                    self.control.broadcast(None)
                    self.control.part()
            return
        while (job := self.control.broadcast(None)) is not None:
            with suppress(Stopped):
                self._work(*job)
        self.control.part()

    def ask(self, name: str, items: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
        """Deal the items to the copies of the model and return their answers in order. On rank 0 only."""
        self.control.broadcast((name, items, options))
        return self._work(name, items, options)

    def _work(self, name: str, items: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
        """Copy r of n takes the items r, r + n, ...: none is padded, and a copy may have none."""
        number, copies = self.stage.copy
        mine = items[number::copies]
        self.broken = True
        try:
            answers = list(self.workers[name](mine, options)) if mine else []
            self.stage.finish()
        except Stopped:
            self.broken = False
            raise
        parts = self.control.gather((number, answers) if self.stage.has_results else None)
        self.broken = False
        found: list[Any] = [None] * len(items)
        for copy, part in filter(None, parts):
            found[copy::copies] = part
        return found
