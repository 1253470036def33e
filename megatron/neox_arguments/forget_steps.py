"""Which steps of a run unlearn (`ga_dataset`), and from which sources each step takes its samples.

A pure function of the step, counted from 0, as all of a `BatchPlan`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TRAIN, FORGET, RETAIN = "train", "forget", "retain"
SOURCES = (TRAIN, FORGET, RETAIN)
"""Roles of data from which steps take samples. Saved in checkpoints by these names."""


@dataclass(frozen=True)
class ForgetSteps:
    """From step `first` on, `burst` of every `period` steps forget; all others are ordinary ones.

    Attributes:
        sources: what such a step takes a whole batch of: the forget data, and what is retained in the same step
            (gradient difference).
        lr_scale: the learning rate of such a step is multiplied by this.
    """

    first: int
    period: int
    burst: int = 1
    sources: tuple[str, ...] = (FORGET,)
    lr_scale: float = 1.0

    @classmethod
    def from_values(cls, value: Callable[[str], Any]) -> ForgetSteps | None:
        """That of flat keys; None for a run that does not unlearn.

        * interleaved, ratio R: the steps R + 1, 2 (R + 1), ..., as in the code of GPT-NeoX's fork: 3, 6, 9 for 2. With
          R = 0 all of them.
        * interval N, `ga_iters` K: N ordinary steps, then K that forget, and again.
        """
        if value("ga_dataset") is None:
            return None
        period, burst = value("ga_interleave_ratio") + 1, 1
        first = period if period > 1 else 0
        if value("ga_mode") == "interval":
            first, burst = value("ga_interval"), value("ga_iters")
            period = first + burst
        sources = (FORGET, RETAIN) if value("gd_mode") else (FORGET,)
        return cls(first, period, burst, sources, value("ga_lr_scale"))

    def is_one(self, step: int) -> bool:
        """Whether this step forgets."""
        return step >= self.first and (step - self.first) % self.period < self.burst

    def burst_of(self, step: int) -> int:
        """The first step of the burst that a step which forgets is in."""
        return step - (step - self.first) % self.period

    def before(self, step: int) -> int:
        """How many of the steps before this one forget."""
        whole, rest = divmod(max(step - self.first, 0), self.period)
        return whole * self.burst + min(rest, self.burst)

    def describe(self, steps: int) -> str:
        """How many of a run's steps forget, and which, in a line."""
        burst = f" to {self.first + self.burst - 1}" if self.burst > 1 else ""
        return (
            f"{self.before(steps):,} of {steps:,} steps read {' and '.join(self.sources)} data: {self.first}{burst}, "
            f"counted from 0, and again every {self.period}"
        )
