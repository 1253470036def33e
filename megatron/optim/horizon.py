"""A learning-rate schedule with its lengths in steps, for the styles that look at the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Horizon:
    """A schedule with its lengths in steps.

    Attributes:
        steps: N. `warmup`: w.
        cooldown: of a cycle of so many steps -> how many steps its rate falls at its end.
        cooldown_style: `lr_cooldown_style`.
        rewarmup: of a cycle of so many steps -> how many steps its rate rises at its start.
        cycles: where the cycles end; the last at N.
        power: `lr_decay_power`.
    """

    lr: float
    min_lr: float
    steps: float
    warmup: float
    cooldown: Callable[[float], float] = lambda steps: 0.1 * steps
    cooldown_style: str = "linear"
    rewarmup: Callable[[float], float] = lambda steps: 0.0
    cycles: tuple[float, ...] = ()
    power: float | None = None

    def progress(self, n: float) -> float:
        """p after n completed steps."""
        rest = self.steps - self.warmup
        return min(1.0, (n - self.warmup) / rest) if rest > 0 else 1.0
