"""An exponential down to min_lr."""

from __future__ import annotations

from megatron.optim.schedules import LR_DECAY_STYLES


@LR_DECAY_STYLES.register("exponential")
def exponential(p: float, lr: float, min_lr: float) -> float:
    """lr * (end / lr)^p, end = min_lr, or lr / 2 (GPT-NeoX's half life) when min_lr is 0."""
    end = min_lr if min_lr > 0 else lr / 2
    return lr * (end / lr) ** p if lr > 0 else 0.0
