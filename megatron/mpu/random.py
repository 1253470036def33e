"""Random numbers under tensor parallelism: dropout that agrees across ranks where tensors do, and differs elsewhere.

The default generators are the only ones; they advance alike on all tensor-parallel ranks. Nothing is stored here, so
saving the default generators saves everything, and recomputation (torch.utils.checkpoint) repeats the same masks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from megatron.mpu.state import ParallelState


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the parts' text: the same in every process and Python version, unlike `hash`."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_everything(seed: int, state: ParallelState) -> None:
    """Seed Python's, numpy's and torch's default generators: alike over tensor-parallel ranks, else all different.

    Weights do not depend on this (see `initial_weights.initialize`); dropout does.
    """
    mine = stable_seed(seed, "default", state.dp_rank, state.pp_rank)
    random.seed(mine)
    np.random.seed(mine % 2**32)
    torch.manual_seed(mine)  # every device's generator too


@contextmanager
def tensor_parallel_rng(state: ParallelState) -> Iterator[None]:
    """Inside, random numbers differ on every tensor-parallel rank; afterwards the ranks agree again.

    The inner seed is drawn from the default CPU generator. That graph-breaks a compiled block, so enter this only
    where dropout is on.
    """
    if state.tp_size == 1:
        yield
        return
    drawn = int(torch.randint(2**62, (), device="cpu"))
    devices = [state.device] if state.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(stable_seed(drawn, "tensor parallel", state.tp_rank))
        yield
