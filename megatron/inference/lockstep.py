"""Keeps ranks that work on their own texts within a pass of each other, so that any of them can stop all.

An evaluation while training has to end when a signal arrives, perhaps on one rank alone; and ranks that share their
weights (ZeRO-3) need each other in every pass. So every rank votes before each pass: whether it has texts left, and
whether it was asked to stop. A vote is counted `lag` passes later, when it has long arrived: stages of a pipeline work
on several passes at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class Stopped(Exception):
    """Some rank was asked to stop: raised on every rank before the same pass."""


class Lockstep:
    """The votes of one rank.

    Args:
        group: all ranks that vote; None for one alone.
        lag: passes between a vote and its count; 0 where every rank has to join in every pass.
        stop: whether this rank was asked to stop.
        beat: called before each pass: a sign of progress.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, lag: int, stop: Callable[[], bool], beat: Callable[[], None]
    ) -> None:
        self.group, self.lag, self.stop, self.beat = group, lag, stop, beat
        self._votes: deque[tuple[dist.Work | None, Tensor]] = deque()

    def before_pass(self) -> None:
        """This rank makes a pass. Raises `Stopped`."""
        self._vote(working=True)

    def finish(self, join: Callable[[], None]) -> None:
        """This rank has no texts left: return when none has. `join`: called for each pass that others make meanwhile.

        Raises `Stopped`.
        """
        while self._vote(working=False):
            join()

    def _vote(self, *, working: bool) -> bool:
        """Vote; whether any rank had texts left `lag` votes ago."""
        self.beat()
        votes = torch.tensor([working, self.stop()], dtype=torch.int32)
        work = None if self.group is None else dist.all_reduce(votes, group=self.group, async_op=True)
        self._votes.append((work, votes))
        if len(self._votes) <= self.lag:
            return True
        some_work, some_stop = self._oldest()
        if some_stop or not some_work:
            while self._votes:  # the same number on every rank
                self._oldest()
        if some_stop:
            raise Stopped
        return bool(some_work)

    def _oldest(self) -> list[int]:
        work, votes = self._votes.popleft()
        if work is not None:
            work.wait()
        return votes.tolist()
