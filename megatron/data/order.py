"""Which samples a data-parallel rank reads for a step: a pure function of the samples consumed before it."""

from __future__ import annotations

import numpy as np


def rank_samples(consumed: int, *, micro_batch: int, gas: int, dp_rank: int, dp_size: int) -> np.ndarray:
    """Sample numbers of one rank for the step that begins after `consumed` samples: int64 `[gas, micro_batch]`.

    The step covers `[consumed, consumed + micro_batch * gas * dp_size)`. Micro-batch m of all ranks is the m-th run of
    `micro_batch * dp_size` consecutive samples, and rank r takes the r-th slice of it, as in GPT-NeoX. So the samples
    of a step do not depend on how it is divided.
    """
    micro = np.arange(gas, dtype=np.int64)[:, None] * (micro_batch * dp_size)
    return consumed + micro + dp_rank * micro_batch + np.arange(micro_batch, dtype=np.int64)[None, :]
