"""Work that one rank leads: rank 0 decides, every rank takes part, rank 0 has the results.

`on_rank_zero` is for small decisions that all ranks must agree on. A `Team` is for longer work: rank 0 hands out jobs
whenever it likes, the other ranks serve until it closes. So whatever rank 0 does in between (reading data sets,
computing metrics) needs no counterpart elsewhere, and its failure ends the others instead of leaving them waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.errors import DeepyError
from megatron.inference.stage import Stage
from megatron.mpu.state import ParallelState

T = TypeVar("T")


def on_rank_zero(state: ParallelState, function: Callable[[], T]) -> T:
    """What `function` returns on rank 0, on every rank; a `DeepyError` that it raises is raised on every rank."""
    outcome: Any = None
    if state.rank == 0:
        try:
            outcome = function()
        except DeepyError as error:
            outcome = error
    outcome = _broadcast(state, outcome)
    if isinstance(outcome, DeepyError):
        raise outcome
    return outcome


def _broadcast(state: ParallelState, value: T) -> T:
    if state.topology.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


# Does a share of a job on one copy of the model: (items, options) -> one answer per item.
Worker = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Any]]


class Team:
    """All ranks of a job around one model: `team.run(lead)` on every rank runs `lead()` on rank 0, which may `ask`.

    Args:
        stage: this rank's part of the model.
        workers: what can be asked for, by name; every rank of a copy calls it with the same items. Only the copy's
            speaking rank need return answers.
    """

    def __init__(self, stage: Stage, workers: Mapping[str, Worker]) -> None:
        self.stage = stage
        self.workers = workers
        self._broken = False

    def ask(self, name: str, items: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
        """Deal the items to the copies of the model and return their answers in order. On rank 0 only."""
        _broadcast(self.stage.state, (name, items, options))
        return self._work(name, items, options)

    def run(self, lead: Callable[[], None]) -> None:
        """Run `lead` on rank 0 while the other ranks do what it asks for."""
        state = self.stage.state
        if state.rank == 0:
            try:
                lead()
            finally:
                if not self._broken:  # else the others wait in the middle of a job, and only our end can end them
                    _broadcast(state, None)
            return
        while (job := _broadcast(state, None)) is not None:
            self._work(*job)

    def _work(self, name: str, items: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
        """Copy r of n takes the items r, r + n, ...: none is padded and a copy may have none."""
        state = self.stage.state
        mine = items[state.dp_rank :: state.dp_size]
        self._broken = True
        answers = self.workers[name](mine, options) if mine else []
        found = self._gather(answers, len(items))
        self._broken = False
        return found

    def _gather(self, answers: Sequence[Any], count: int) -> list[Any]:
        state = self.stage.state
        if state.topology.world_size == 1:
            return list(answers)
        spoken = (state.dp_rank, list(answers)) if self.stage.speaks else None
        everyone: list[Any] | None = [None] * state.topology.world_size if state.rank == 0 else None
        dist.gather_object(spoken, everyone, dst=0)
        found: list[Any] = [None] * count
        for copy, part in filter(None, everyone or ()):
            found[copy :: state.dp_size] = part
        return found
