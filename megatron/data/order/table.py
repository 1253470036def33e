"""What each role and source has, and how much of it a run draws: the rows of the table at start and in the dry run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.data.order.role_order import RoleOrder


@dataclass(frozen=True)
class SourceRow:
    """A row of the table at start.

    Attributes:
        role: train, valid, test, or `valid/` and the name of a validation set.
        samples, epochs: what the run draws from the source.
        weight: over the whole run; `weights`: in each phase, which begin at `steps`.
        unreached: the first steps of phases after the end of the run.
    """

    role: str
    name: str
    prefix: str
    documents: int
    tokens: int
    weight: float
    weights: tuple[float, ...]
    steps: tuple[int, ...]
    samples: int
    epochs: float
    unreached: tuple[int, ...] = ()


def source_rows(name: str, role: RoleOrder) -> list[SourceRow]:
    """One row per source of the role called `name`."""
    return [
        SourceRow(
            role=name,
            name=planned.source.name,
            prefix=planned.source.data.prefix,
            documents=planned.source.num_documents,
            tokens=planned.source.tokens,
            weight=drawn.weight,
            weights=drawn.weights,
            steps=tuple(phase.step for phase in role.reached),
            samples=drawn.samples,
            epochs=drawn.epochs,
            unreached=tuple(phase.step for phase in role.phases if phase.first >= role.samples),
        )
        for planned, drawn in zip(role.sources, role.count_draws(), strict=True)
    ]
