"""What ranks publish about themselves, and what follows from it: who is to blame, who is awaited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.training.progress import PHASES


@dataclass(frozen=True)
class Sign:
    """What a rank publishes.

    Attributes:
        beat: number of the publication.
        step, phase: where its main thread is.
        still: seconds for which it has made no progress there, as far as its process ran.
        limit: seconds for which it may.
        waits: it waits for other ranks.
        doing: what it does, in words, if somebody says.
        meetings: how many times it has come to where ranks wait for each other on the host.
        waited: seconds for which it waits there; 0 while it does not.
    """

    beat: int
    step: int
    phase: str
    still: float
    limit: float
    waits: bool
    doing: str = ""
    meetings: int = 0
    waited: float = 0.0

    @property
    def place(self) -> tuple[int, int]:
        """Comparable between ranks: the smaller one is behind."""
        return self.step, PHASES.index(self.phase)


def name_silent(signs: Mapping[int, Sign | None], world_size: int) -> str:
    """Who is to blame for a job that makes no progress: ranks that do not answer, else those behind the others, else
    those that do not wait for others while the others do. `signs`: of the ranks; None for one that does not answer."""
    answering = {rank: sign for rank, sign in signs.items() if sign is not None}
    silent = [rank for rank in signs if rank not in answering]
    if silent:
        return f"{_ranks(silent, world_size)} not answer (stopped, or its host is gone)"
    first = min(sign.place for sign in answering.values())
    behind = [rank for rank, sign in answering.items() if sign.place == first]
    busy = [rank for rank, sign in answering.items() if not sign.waits]
    doing = next((f": {answering[rank].doing}" for rank in [*busy, *behind] if answering[rank].doing), "")
    where = f"in step {first[0]} ({PHASES[first[1]]}{doing})" if first[0] else f"at the start{doing}"
    if len(behind) < world_size:
        return f"{_ranks(behind, world_size)} not continue {where}, the others are further"
    if 0 < len(busy) < world_size:
        return f"{_ranks(busy, world_size)} not continue {where}, the others wait for it"
    return f"{f'all {world_size} ranks make' if world_size > 1 else 'the run makes'} no progress {where}"


def name_awaited(own: Sign, signs: Mapping[int, Sign | None], world_size: int) -> str | None:
    """For whom a rank waits on the host, and for what; None when all have come. `signs`: as for `name_silent`."""
    awaited = [rank for rank, sign in signs.items() if sign is None or sign.meetings < own.meetings]
    if not awaited:
        return None
    sign = signs[awaited[0]]
    what = "it does not answer" if sign is None else sign.doing or f"step {sign.step}, {sign.phase}"
    return f"waiting {own.waited:.0f} s for {name_ranks(awaited, world_size)}: {what}"


def name_ranks(ranks: list[int], world_size: int) -> str:
    """ "ranks 0, 2 of 4"."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown} of {world_size}"


def _ranks(ranks: list[int], world_size: int) -> str:
    return f"{name_ranks(ranks, world_size)} {'do' if len(ranks) > 1 else 'does'}"
