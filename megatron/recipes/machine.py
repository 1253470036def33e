"""What this machine computes with, and about how fast it trains."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
import torch

from megatron.callbacks.flops import device_peak

# The share of its peak that a training step reaches: of a GPU's data sheet (what dense models of 1B parameters do), and
# of the matrix products timed here on a CPU (60M parameters, two cores: measured).
GPU_SHARE, CPU_SHARE = 0.4, 0.6
_UNKNOWN_GPU = 100e12  # FLOP/s where there is no data sheet
_SECONDS = 0.3  # of timing


@dataclass(frozen=True)
class Machine:
    """Attributes:
    name: for people.
    ranks: processes that a run gets by itself: one a GPU.
    gpus: whether they have GPUs.
    memory: bytes that each rank may use.
    flops: FLOP/s of training, over all ranks.
    precision: the fastest of the config's.
    """

    name: str
    ranks: int
    gpus: bool
    memory: float
    flops: float
    precision: str


def look() -> Machine:
    """This machine. On a CPU, matrix products are timed for a second."""
    count = torch.cuda.device_count()
    if count:
        facts = torch.cuda.get_device_properties(0)
        peak = device_peak(torch.device("cuda", 0), None) or _UNKNOWN_GPU
        precision = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        return Machine(
            f"{count} x {facts.name}", count, True, 0.8 * facts.total_memory, GPU_SHARE * peak * count, precision
        )
    single, half = (_time_products(kind) for kind in (torch.float32, torch.bfloat16))
    # Half precision is worth it only where the processor has it: elsewhere it is emulated, and a hundred times slower.
    precision, speed = ("bfloat16", half) if half > 1.5 * single else ("fp32", single)
    cores = torch.get_num_threads()
    memory = psutil.virtual_memory().available
    return Machine(f"{cores} CPU cores", 1, False, 0.5 * memory, CPU_SHARE * speed, precision)


def _time_products(kind: torch.dtype) -> float:
    """FLOP/s of products of matrices like a small model's."""
    rows, width = 512, 512
    left, right = torch.ones(rows, width, dtype=kind), torch.ones(width, width, dtype=kind)
    best = float("inf")
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        start = time.monotonic()
        torch.mm(left, right)
        best = min(best, time.monotonic() - start)
    return 2 * rows * width * width / best
