"""No more epochs of a source than its cap allows: checked before training, with the numbers that would work.

A mixture that would read a source too often is an error. With `train_data_on_cap: redistribute` such a source gets as
large a weight as its samples allow, evenly over the phase, and the others share the rest in their proportions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.data.order.mixture import most_taken
from megatron.data.order.phases import Phase, Progress, Weights, alike, lengths
from megatron.errors import UserError

Most = Sequence[int | None]
"""The samples that may be drawn from each source in a whole run; None: any number."""


@dataclass(frozen=True)
class Caps:
    """The caps of the sources of a mixture.

    Attributes:
        names: the sources.
        epoch: samples in one epoch of each.
        most: see `Most`.
        redistribute: lower the weights of sources that do not last, instead of raising an error.
    """

    names: Sequence[str]
    epoch: Sequence[int]
    most: Most
    redistribute: bool = False

    def fit(self, phases: tuple[Phase, ...], samples: int, progress: Progress) -> tuple[Phase, ...]:
        """Phases for `samples` samples within the caps; past phases do not change.

        Raises `UserError` naming the source, the samples asked for and allowed, and the most that would work.
        """
        if all(most is None for most in self.most):
            return phases
        fitted = _fit(phases, samples, progress, self.most, self.redistribute)
        if fitted is None:
            raise UserError(self._describe_excess(phases, samples, progress))
        return fitted

    def _describe_excess(self, phases: tuple[Phase, ...], samples: int, progress: Progress) -> str:
        taken = most_per_source(phases, samples)
        over = [d for d, most in enumerate(self.most) if most is not None and taken[d] > most]
        counts = lengths(phases, samples)
        lines = []
        for d in over:
            most = self.most[d]
            assert most is not None
            largest = max(phase.asked[d] for phase in phases)
            epochs = math.ceil(taken[d] / self.epoch[d] * 1000) / 1000 if self.epoch[d] else None
            advice = f"set train_data_max_epochs: {epochs:.12g}" if epochs is not None else "use more data"
            if sum(1 for count in counts if count) == 1 and not progress.consumed:
                advice += f", or a weight of at most {_round_down(most / samples):.4g} (it is {largest:.4g})"
            lines.append(
                f"  {self.names[d]}: {taken[d]} samples are needed ({_epochs(taken[d], self.epoch[d])}), "
                f"{most} are allowed ({_epochs(most, self.epoch[d])}); {advice}"
            )
        feasible = self._most_samples(phases, samples, progress)
        if feasible < progress.consumed:
            remedy = f"The run has already read more in its {progress.steps} steps: raise the cap."
            return "\n".join(["train_data_max_epochs: the cap is below what this run has read.", *lines, remedy])
        remedy = f"Or shorten the run to train_iters {progress.step_at(feasible)}."
        if not self.redistribute:
            remedy += " Or set train_data_on_cap: redistribute, which takes the missing samples from the other sources."
        return "\n".join(["train_data_max_epochs: the training data is too small for this run.", *lines, remedy])

    def _most_samples(self, phases: tuple[Phase, ...], samples: int, progress: Progress) -> int:
        low, high = 0, samples  # low can be drawn, high not
        while high - low > 1:
            middle = (low + high) // 2
            fits = _fit(phases, middle, progress, self.most, self.redistribute) is not None
            low, high = (middle, high) if fits else (low, middle)
        return low


def _round_down(value: float) -> float:
    """To the four digits that are shown; rounding up would be too much."""
    scale = 10 ** (3 - math.floor(math.log10(value))) if value > 0 else 1
    return math.floor(value * scale) / scale


def _epochs(samples: int, epoch: int) -> str:
    return f"{samples / epoch:.3g} epochs" if epoch else "no epoch"


def most_per_source(phases: Sequence[Phase], samples: int) -> list[int]:
    """The most that each source gives in a run of `samples`."""
    counts = lengths(phases, samples)
    sources = range(len(phases[0].weights))
    return [sum(most_taken(n, phase.weights[d]) for n, phase in zip(counts, phases, strict=True)) for d in sources]


def _fit(
    phases: tuple[Phase, ...], samples: int, progress: Progress, most: Most, redistribute: bool
) -> tuple[Phase, ...] | None:
    """Phases within the caps, or None. Earlier phases come first."""
    past = [phase for phase in phases if phase.first < progress.consumed]
    to_come = [replace(phase, weights=phase.asked) for phase in phases if phase.first >= progress.consumed]
    whole = [*past, *to_come]
    if (not past or alike(past[-1].weights, past[-1].asked)) and _within(most_per_source(whole, samples), most):
        return tuple(whole)
    if past and (not to_come or to_come[0].first > progress.consumed):
        # The rest of the current phase may need other weights.
        to_come.insert(0, replace(past[-1], step=progress.steps, first=progress.consumed))
    fitted = past
    for phase, length in zip(to_come, lengths(to_come, samples), strict=True):
        gone = most_per_source(fitted, phase.first) if fitted else [0] * len(most)
        left = [None if cap is None else max(0, cap - now) for cap, now in zip(most, gone, strict=True)]
        weights = spread(phase.asked, length, left) if redistribute else phase.asked
        if weights is None:
            return None
        if not (fitted and alike(weights, fitted[-1].weights) and alike(phase.asked, fitted[-1].asked)):
            fitted.append(replace(phase, weights=weights))
    return tuple(fitted) if _within(most_per_source(fitted, samples), most) else None


def _within(taken: Sequence[int], most: Most) -> bool:
    return all(cap is None or now <= cap for now, cap in zip(taken, most, strict=True))


def spread(asked: Weights, samples: int, left: Most) -> Weights | None:
    """Weights for `samples` draws that take no more than `left` of any source, nearest to `asked`; None: impossible.

    A source that does not last gets `left / samples`; the others share what that leaves, in their proportions, which
    may bring the next one to its limit.
    """
    weights = list(asked)
    full: set[int] = set()
    while samples > 0:
        over = [
            d
            for d, cap in enumerate(left)
            if d not in full and cap is not None and most_taken(samples, weights[d]) > cap
        ]
        if not over:
            break
        full.update(over)
        free = [d for d, weight in enumerate(asked) if d not in full and weight > 0]
        for d in full:
            weights[d] = (left[d] or 0) / samples
        rest = 1.0 - sum(weights[d] for d in full)
        total = sum(asked[d] for d in free)
        if not free:
            return tuple(weights) if abs(rest) * samples < 0.5 else None
        for d in free:
            weights[d] = asked[d] / total * rest
    return tuple(weights)
