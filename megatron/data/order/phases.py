"""Weights that change over time: a run is a sequence of phases, each with the weights of all sources.

Configs give phases in steps, the order counts samples. `Progress` converts: past steps may have had another batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.neox_arguments.batch_plan import BatchPlan

Weights = tuple[float, ...]

_SAME = 1e-12  # weights that differ by less were written in two ways


@dataclass(frozen=True)
class Phase:
    """From its first sample on, sources are drawn in these proportions.

    Attributes:
        step: its first step.
        first: samples consumed before it.
        weights: one per source, adding up to 1; 0 draws nothing.
        asked: the weights of the configuration; `weights` differs where others replace a used-up source (caps).
    """

    step: int
    first: int
    weights: Weights
    asked: Weights

    @staticmethod
    def constant(weights: Sequence[float]) -> Phase:
        """One for a whole run."""
        return Phase(0, 0, tuple(weights), tuple(weights))

    def select(self, sources: Sequence[int]) -> Phase:
        """The same for some of the sources."""
        weights, asked = (tuple(of[d] for d in sources) for of in (self.weights, self.asked))
        return replace(self, weights=weights, asked=asked)


@dataclass(frozen=True)
class Progress:
    """How far a run is: `consumed` samples of its order before step `steps`; later steps take what `batches` says, by
    default `batch`, which is what an evaluation takes at a time.

    `start`: the run's own first step, and the samples consumed before it. (0, 0), unless it started from another run's
    checkpoint (`init_from`), of which it continues the steps, the samples, or both.
    """

    batch: int = 1
    steps: int = 0
    consumed: int = 0
    start: tuple[int, int] = (0, 0)
    batches: BatchPlan | None = None

    @property
    def _plan(self) -> BatchPlan:
        return self.batches or BatchPlan.constant(self.batch)

    def samples_at(self, step: int) -> int:
        """Samples consumed before `step`. Exact for past steps if their batches were those of the plan."""
        first, before = self.start
        since = self._plan.samples(step) - self._plan.samples(self.steps)
        return max(before, self.consumed + since) if step > first else before

    def step_at(self, samples: int) -> int:
        """The last step before which at most `samples` samples are consumed."""
        return max(self.start[0], self._plan.whole_steps(self._plan.samples(self.steps) + samples - self.consumed))


def alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two lists of weights are equal but for rounding."""
    return all(abs(a - b) <= _SAME for a, b in zip(one, other, strict=True))


def make_phases(wanted: Sequence[tuple[int, Weights]], progress: Progress) -> tuple[Phase, ...]:
    """The phases of a fresh run from (step, weights) pairs; a border without a change is left out."""
    return _append((), wanted, progress)


def continue_phases(
    past: Sequence[Phase], wanted: Sequence[tuple[int, Weights]], progress: Progress
) -> tuple[Phase, ...]:
    """The phases of a resumed run: its `past` unchanged, then what is wanted from `progress.steps` on."""
    kept = tuple(phase for phase in past if phase.step < progress.steps)
    return _append(kept, [pair for pair in wanted if pair[0] >= progress.steps], progress)


def _append(phases: tuple[Phase, ...], wanted: Sequence[tuple[int, Weights]], progress: Progress) -> tuple[Phase, ...]:
    for step, weights in wanted:
        if not phases or not alike(weights, phases[-1].asked):
            phases = (*phases, Phase(step, progress.samples_at(step), weights, weights))
    return phases


def steps_and_weights(phases: Sequence[Phase]) -> list[tuple[int, Weights]]:
    """What was asked for, as (step, weights) pairs that differ from one to the next."""
    pairs: list[tuple[int, Weights]] = []
    for phase in phases:
        if not pairs or not alike(phase.asked, pairs[-1][1]):
            pairs.append((phase.step, phase.asked))
    return pairs


def phases_before(wanted: Sequence[tuple[int, Weights]], step: int) -> list[tuple[int, Weights]]:
    """The (step, weights) pairs before `step`, without borders at which nothing changes."""
    pairs: list[tuple[int, Weights]] = []
    for start, weights in wanted:
        if start < step and not (pairs and alike(weights, pairs[-1][1])):
            pairs.append((start, weights))
    return pairs


def phases_from(wanted: Sequence[tuple[int, Weights]], step: int) -> list[tuple[int, Weights]]:
    """(step, weights) pairs from `step` on: the weights at `step`, then the later pairs."""
    held = [weights for start, weights in wanted if start <= step]
    return [*((step, weights) for weights in held[-1:]), *(pair for pair in wanted if pair[0] > step)]


def lengths(phases: Sequence[Phase], samples: int) -> list[int]:
    """Samples in each phase of a run of `samples`; phases that are not reached have 0."""
    ends = [*(phase.first for phase in phases[1:]), samples]
    return [max(0, min(end, samples) - phase.first) for phase, end in zip(phases, ends, strict=True)]


def shares(phases: Sequence[Phase], samples: int) -> list[float]:
    """Samples of each source in a run of `samples`, by weight (draws are whole numbers near it)."""
    counts = lengths(phases, samples)
    sources = range(len(phases[0].weights)) if phases else ()
    return [sum(n * phase.weights[d] for n, phase in zip(counts, phases, strict=True)) for d in sources]
