"""Warm-up, a stable rate, and a cooldown: once (WSD), or in cycles (WSD-S).

Hu et al. 2024 (MiniCPM), arXiv 2404.06395; Wen et al. 2024, arXiv 2410.05192. Cooldowns: linear and sqrt as in Hägele
et al. 2024, arXiv 2405.18392; inverse as in lingua, lr / (p * lr / min_lr + 1 - p).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron.optim.horizon import Horizon
from megatron.optim.schedules import LR_DECAY_STYLES


def _between(share: float, lr: float, min_lr: float) -> float:
    return min_lr + (lr - min_lr) * share


COOLDOWNS: dict[str, Callable[[float, float, float], float]] = {
    "linear": lambda p, lr, min_lr: _between(1 - p, lr, min_lr),
    "sqrt": lambda p, lr, min_lr: _between(1 - math.sqrt(p), lr, min_lr),
    "cosine": lambda p, lr, min_lr: _between((1 + math.cos(math.pi * p)) / 2, lr, min_lr),
    "inverse": lambda p, lr, min_lr: 1 / (p / min_lr + (1 - p) / lr),
}
"""(progress of the cooldown, lr, min_lr) -> learning rate."""


@LR_DECAY_STYLES.register("wsd", reads=("lr_cooldown", "lr_cooldown_style"))
def wsd(n: float, horizon: Horizon) -> float:
    """lr, and over the last lr_cooldown of the schedule down to min_lr."""
    return _cool(n, horizon, horizon.warmup, horizon.steps, horizon.cooldown(horizon.steps))


@LR_DECAY_STYLES.register("wsd_s", reads=("lr_cooldown", "lr_cooldown_style", "lr_cycles", "lr_rewarmup"))
def wsd_s(n: float, horizon: Horizon) -> float:
    """Cycles (lr_cycles) of lr_rewarmup up from min_lr, lr, and lr_cooldown down to min_lr."""
    cycles = horizon.cycles or (horizon.steps,)
    index = sum(end <= n for end in cycles[:-1])
    start, end = (0.0, *cycles)[index], cycles[index]
    length = end - start
    risen = start + horizon.rewarmup(length) if index else horizon.warmup
    if n < risen and index:
        return _between(max(1.0, n - start) / (risen - start), horizon.lr, horizon.min_lr)
    return _cool(n, horizon, risen, end, horizon.cooldown(length))


def _cool(n: float, horizon: Horizon, risen: float, end: float, steps: float) -> float:
    """The rate of a cycle that has risen after `risen` steps and falls over the last `steps` before `end`."""
    start = max(risen, end - steps)
    if n <= start and n < end:
        return horizon.lr
    p = min(1.0, (n - start) / (end - start)) if end > start else 1.0
    return COOLDOWNS[horizon.cooldown_style](p, horizon.lr, horizon.min_lr)
