"""Constant: the peak to the end."""

from __future__ import annotations

from megatron.optim.schedules import LR_DECAY_STYLES


@LR_DECAY_STYLES.register("constant")
def constant(p: float, lr: float, min_lr: float) -> float:
    """lr."""
    return lr
