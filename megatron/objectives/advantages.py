"""From the rewards of completions to their advantages.

Rewards are float64 `[p, k]`: `k` completions of each of `p` prompts, in the order of the global batch; NaN where a
completion has none. Such a one gets the advantage 0 and no part in a baseline.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

REMEMBERED = 100
"""How many means `moving_baseline` remembers, as in GPT-NeoX."""
EPSILON = 1e-4
"""Added to standard deviations, as in TRL."""


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Each reward less the mean of the others of its prompt; 0 where there are no others.

    Source: Ahmadian et al. 2024, "Back to Basics", RLOO.
    """
    known = ~np.isnan(rewards)
    others = known.sum(axis=1, keepdims=True) - known
    sums = np.nansum(rewards, axis=1, keepdims=True) - np.where(known, rewards, 0.0)
    found = rewards - sums / np.maximum(others, 1)
    return np.where(known & (others > 0), found, 0.0)


def group_relative(rewards: np.ndarray, scale: str = "group") -> np.ndarray:
    """Each reward less the mean of its prompt.

    Args:
        scale: divide by the standard deviation (of n - 1) of its prompt's rewards ("group", Shao et al. 2024, GRPO), of
            all ("batch"), or not ("none", Liu et al. 2025, Dr. GRPO).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of prompts without rewards: NaN is what is wanted
        found = rewards - np.nanmean(rewards, axis=1, keepdims=True)
        if scale == "group":
            found = found / (_deviation(rewards, axis=1) + EPSILON)
        elif scale == "batch":
            found = found / (_deviation(rewards, axis=None) + EPSILON)
    return np.nan_to_num(found, nan=0.0)


def _deviation(rewards: np.ndarray, axis: int | None) -> np.ndarray:
    """The standard deviation of n - 1; 0 of a single one."""
    count = (~np.isnan(rewards)).sum(axis=axis, keepdims=True)
    squares = np.nansum((rewards - np.nanmean(rewards, axis=axis, keepdims=True)) ** 2, axis=axis, keepdims=True)
    return np.sqrt(squares / np.maximum(count - 1, 1))


def moving_baseline(rewards: np.ndarray, means: Sequence[float]) -> tuple[np.ndarray, list[float]]:
    """Each reward less the mean of `means`, the mean rewards of the last prompts before its own, 0 for the first.

    Returns the advantages and the means of the last `REMEMBERED` prompts.
    """
    kept, found = list(means), np.zeros_like(rewards)
    for row, group in enumerate(rewards):
        found[row] = np.nan_to_num(group - (np.mean(kept) if kept else 0.0), nan=0.0)
        if not np.isnan(group).all():
            kept = [*kept, float(np.nanmean(group))][-REMEMBERED:]
    return found, kept
