"""A straight line to 0."""

from __future__ import annotations

from megatron.optim.schedules import LR_DECAY_STYLES


@LR_DECAY_STYLES.register("linear")
def linear(p: float, lr: float, min_lr: float) -> float:
    """lr * (1 - p)."""
    return lr * (1 - p)
