"""Half a cosine down to min_lr."""

from __future__ import annotations

import math

from megatron.optim.schedules import LR_DECAY_STYLES


@LR_DECAY_STYLES.register("cosine")
def cosine(p: float, lr: float, min_lr: float) -> float:
    """min_lr + (lr - min_lr) / 2 * (1 + cos(pi p))."""
    return min_lr + (lr - min_lr) / 2 * (1 + math.cos(math.pi * p))
