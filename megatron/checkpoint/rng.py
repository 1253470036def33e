"""Random state of one rank: Python's, numpy's and torch's default generators, as plain values and tensors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of every default generator, readable with `weights_only`."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Take back what `random_state` gave."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].clone())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].clone())


def reseed_after(step: int) -> None:
    """Move the seeded generators to a place that depends on `step`.

    For a resume at another layout, where the saved states belong to ranks that no longer exist: the run must not
    draw the masks of its first steps again.
    """
    seed = (torch.initial_seed() + 0x9E3779B97F4A7C15 * (step + 1)) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
