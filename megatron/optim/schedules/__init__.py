"""Learning rates as pure functions of the number of completed steps. Nothing is counted, so nothing drifts on resume.

With N = `lr_decay_iters`, w = `warmup` * N and n completed steps (GPT-NeoX's megatron/learning_rates.py):

    n <= w:  lr * max(1, n) / w                              (never 0: the first step trains)
    else     p = min(1, (n - w) / (N - w)), then by style, one per file, of p or of min(n, N),

floored at min_lr. GPT-NeoX leaves p unclamped, so its cosine rises again after N, and its exponential ends at
lr / 2 whatever min_lr is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.optim.horizon import Horizon
from megatron.registry import Registry, import_entries

Style = Callable[..., float]
LR_DECAY_STYLES: Registry[Style] = Registry(
    "lr_decay_style", wants="a function (p, lr, min_lr) -> learning rate", fits=callable, fields=("reads",)
)
"""Shapes of the decay. An entry is a pure function (p, lr, min_lr) -> learning rate, for progress p in [0, 1] after the
warm-up; what it gives below min_lr is raised to it. One that is registered with `reads=(...)`, the names of the keys
that it alone reads, is a function (n, `Horizon`) -> learning rate of the completed steps n, w < n <= N.
"""


def learning_rate(
    step: int, *, lr: float, min_lr: float, decay_iters: int, warmup: float, style: str, **shape: Any
) -> float:
    """Learning rate of the training step that follows `step` completed ones.

    Args:
        step: completed steps, >= 0.
        lr: peak learning rate.
        min_lr: floor.
        decay_iters: N, the length of the schedule in steps, warm-up included.
        warmup: share of N spent warming up.
        style: a name of `LR_DECAY_STYLES`.
        shape: what else a `Horizon` has.
    """
    horizon = Horizon(lr, min_lr, decay_iters, warmup * decay_iters, **shape)
    if horizon.warmup > 0 and step <= horizon.warmup:
        return lr * min(1.0, max(1, step) / horizon.warmup)
    rate, reads = LR_DECAY_STYLES[style], LR_DECAY_STYLES.row(style).get("reads")
    if reads is None:
        return max(min_lr, rate(horizon.progress(step), lr, min_lr))
    # A warm-up longer than the schedule has ended all the same.
    return max(min_lr, rate(min(step, max(decay_iters, horizon.warmup)), horizon))


def schedule(
    *, lr: float, min_lr: float, decay_iters: int, warmup: float, style: str, **shape: Any
) -> Callable[[int], float]:
    """`learning_rate` with everything but the step filled in."""
    LR_DECAY_STYLES[style]  # an unknown style is reported now, not at the first step
    return partial(learning_rate, lr=lr, min_lr=min_lr, decay_iters=decay_iters, warmup=warmup, style=style, **shape)


import_entries(__name__, __path__)
