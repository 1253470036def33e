"""Powers of the progress, and of the step."""

from __future__ import annotations

from megatron.optim.horizon import Horizon
from megatron.optim.schedules import LR_DECAY_STYLES


@LR_DECAY_STYLES.register("polynomial", reads=("lr_decay_power",))
def polynomial(n: float, horizon: Horizon) -> float:
    """min_lr + (lr - min_lr) * (1 - p)^k, k = lr_decay_power (default 1)."""
    k = 1.0 if horizon.power is None else horizon.power
    return horizon.min_lr + (horizon.lr - horizon.min_lr) * (1 - horizon.progress(n)) ** k


@LR_DECAY_STYLES.register("power", reads=("lr_decay_power",))
def power(n: float, horizon: Horizon) -> float:
    """lr * (w / n)^k for w steps of warm-up (1 if there is none), k = lr_decay_power (default 0.5)."""
    k = 0.5 if horizon.power is None else horizon.power
    start = max(1.0, horizon.warmup)
    return horizon.lr * (start / max(n, start)) ** k


@LR_DECAY_STYLES.register("inverse_sqrt", reads=())
def inverse_sqrt(n: float, horizon: Horizon) -> float:
    """lr * sqrt(w / n) for w steps of warm-up (1 if there is none)."""
    start = max(1.0, horizon.warmup)
    return horizon.lr * (start / max(n, start)) ** 0.5
