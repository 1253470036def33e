"""No more epochs of a source than its cap allows: found out before training, with the numbers that would work.

By default a mixture that would read a source too often is refused. With `train_data_on_cap: redistribute` such a source
gets as large a weight as its samples allow, evenly over the phase, and the others share the rest in their proportions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.data.order.mixture import most_taken
from megatron.data.order.phases import Phase, Progress, Weights, alike, lengths
from megatron.errors import UserError

Most = Sequence[int | None]
"""The samples that each source may give over a whole run; None: any number."""


@dataclass(frozen=True)
class Caps:
    """What caps the sources of a mixture.

    Attributes:
        names: the sources.
        epoch: samples in one epoch of each.
        most: see `Most`.
        redistribute: instead of refusing a mixture, lower the weights of sources that do not last.
    """

    names: Sequence[str]
    epoch: Sequence[int]
    most: Most
    redistribute: bool = False

    def fit(self, phases: tuple[Phase, ...], samples: int, progress: Progress) -> tuple[Phase, ...]:
        """Phases that `samples` samples can be drawn from without breaking a cap; what is past stays as it was.

        Raises `UserError` naming source, what it is asked for and has, and the most that would work.
        """
        if all(most is None for most in self.most):
            return phases
        fitted = _fit(phases, samples, progress, self.most, self.redistribute)
        if fitted is None:
            raise UserError(self._refusal(phases, samples, progress))
        return fitted

    def _refusal(self, phases: tuple[Phase, ...], samples: int, progress: Progress) -> str:
        taken = used(phases, samples)
        over = [d for d, most in enumerate(self.most) if most is not None and taken[d] > most]
        counts = lengths(phases, samples)
        lines = []
        for d in over:
            most = self.most[d]
            assert most is not None
            largest = max(phase.asked[d] for phase in phases)
            epochs = math.ceil(taken[d] / self.epoch[d] * 1000) / 1000 if self.epoch[d] else None
            advice = f"train_data_max_epochs: {epochs:.12g}" if epochs is not None else "more data"
            if sum(1 for count in counts if count) == 1 and not progress.consumed:
                advice += f", or a weight of at most {_rounded_down(most / samples):.4g} (it is {largest:.4g})"
            lines.append(
                f"  {self.names[d]}: {taken[d]} samples are asked for ({_epochs(taken[d], self.epoch[d])}), "
                f"{most} are allowed ({_epochs(most, self.epoch[d])}); enough would be {advice}"
            )
        feasible = self._most_samples(phases, samples, progress)
        if feasible < progress.consumed:
            remedy = f"The run has read more than that in its {progress.steps} steps already: only another cap helps."
            return "\n".join(["train_data_max_epochs: the cap is below what this run has read.", *lines, remedy])
        remedy = f"The most that works as it is: train_iters {progress.step_at(feasible)}."
        if not self.redistribute:
            remedy += " train_data_on_cap: redistribute takes what is missing from the other sources."
        return "\n".join(["train_data_max_epochs: the training data does not last for this run.", *lines, remedy])

    def _most_samples(self, phases: tuple[Phase, ...], samples: int, progress: Progress) -> int:
        low, high = 0, samples  # low can be drawn, high not
        while high - low > 1:
            middle = (low + high) // 2
            fits = _fit(phases, middle, progress, self.most, self.redistribute) is not None
            low, high = (middle, high) if fits else (low, middle)
        return low


def _rounded_down(value: float) -> float:
    """To four digits, as it is shown: rounded up it would be too much."""
    scale = 10 ** (3 - math.floor(math.log10(value))) if value > 0 else 1
    return math.floor(value * scale) / scale


def _epochs(samples: int, epoch: int) -> str:
    return f"{samples / epoch:.3g} epochs" if epoch else "no epoch"


def used(phases: Sequence[Phase], samples: int) -> list[int]:
    """The most that each source gives in a run of `samples`."""
    counts = lengths(phases, samples)
    sources = range(len(phases[0].weights))
    return [sum(most_taken(n, phase.weights[d]) for n, phase in zip(counts, phases, strict=True)) for d in sources]


def _fit(
    phases: tuple[Phase, ...], samples: int, progress: Progress, most: Most, redistribute: bool
) -> tuple[Phase, ...] | None:
    """Phases within the caps, or None. The first phases are served first."""
    begun = [phase for phase in phases if phase.first < progress.consumed]
    to_come = [replace(phase, weights=phase.asked) for phase in phases if phase.first >= progress.consumed]
    whole = [*begun, *to_come]
    if (not begun or alike(begun[-1].weights, begun[-1].asked)) and _within(used(whole, samples), most):
        return tuple(whole)
    if begun and (not to_come or to_come[0].first > progress.consumed):
        # What is left of the running phase may need other weights from here on.
        to_come.insert(0, replace(begun[-1], step=progress.steps, first=progress.consumed))
    fitted = begun
    for phase, length in zip(to_come, lengths(to_come, samples), strict=True):
        gone = used(fitted, phase.first) if fitted else [0] * len(most)
        left = [None if cap is None else max(0, cap - now) for cap, now in zip(most, gone, strict=True)]
        weights = spread(phase.asked, length, left) if redistribute else phase.asked
        if weights is None:
            return None
        if not (fitted and alike(weights, fitted[-1].weights) and alike(phase.asked, fitted[-1].asked)):
            fitted.append(replace(phase, weights=weights))
    return tuple(fitted) if _within(used(fitted, samples), most) else None


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
