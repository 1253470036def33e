"""What this machine computes with, and about how fast it trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil
import torch

from megatron.callbacks.flops import device_peak

GPU_SHARE = 0.4  # of the data sheet's peak that a training step reaches: what dense models of 1B parameters do
_UNKNOWN_GPU = 100e12  # FLOP/s where there is no data sheet
_WIDEST, _LONGEST = 1024, 512  # of a layer that is timed: larger ones are no faster


@dataclass(frozen=True)
class Machine:
    """Attributes:
    name: for people.
    ranks: processes that a run gets by itself: one a GPU.
    gpus: whether they have GPUs.
    memory: bytes that each rank may use.
    flops: FLOP/s of training, over all ranks.
    precision: the fastest of the config's.
    spare: there are more GPUs than these ranks.
    """

    name: str
    ranks: int
    gpus: bool
    memory: float
    flops: float
    precision: str
    spare: bool = False

    def dividing(self, batch: int) -> Machine:
        """As many of its ranks as a batch, a power of two, is divided among evenly."""
        ranks = 1 << (min(self.ranks, batch).bit_length() - 1)
        if ranks == self.ranks:
            return self
        name, flops = f"{ranks} of {self.name}", self.flops * ranks / self.ranks
        return replace(self, name=name, ranks=ranks, flops=flops, spare=True)


def look(width: int, context: int) -> Machine:
    """This machine, for a model of this width and context. On a CPU one layer is timed, forward and backward."""
    count = torch.cuda.device_count()
    if count:
        facts = torch.cuda.get_device_properties(0)
        peak = device_peak(torch.device("cuda", 0), None) or _UNKNOWN_GPU
        precision = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        return Machine(
            f"{count} x {facts.name}", count, True, 0.8 * facts.total_memory, GPU_SHARE * peak * count, precision
        )
    # Half precision is worth it only where the processor has it: elsewhere it is emulated, and a hundred times slower.
    single, half = (_product_seconds(kind) for kind in (torch.float32, torch.bfloat16))
    kind, precision = (torch.bfloat16, "bfloat16") if half < single / 1.5 else (torch.float32, "fp32")
    flops = _layer_flops(min(width, _WIDEST) // 64 * 64 or 64, min(context, _LONGEST), kind)
    cores, memory = torch.get_num_threads(), 0.5 * psutil.virtual_memory().available
    return Machine(f"{cores} CPU core{'s' if cores > 1 else ''}", 1, False, memory, flops, precision)


def _product_seconds(kind: torch.dtype, size: int = 256) -> float:
    """Of the product of two square matrices."""
    matrix = torch.ones(size, size, dtype=kind)
    return min(_seconds(lambda: torch.mm(matrix, matrix)) for _ in range(5))


def _layer_flops(width: int, context: int, kind: torch.dtype) -> float:
    """FLOP/s of a training step of one layer of a transformer, its head dimension 64, on four samples."""
    layer = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, dtype=kind)
    inputs = torch.ones(4, context, width, dtype=kind)
    seconds = min(_seconds(lambda: layer(inputs).sum().backward()) for _ in range(3))
    return inputs.shape[0] * context * (72 * width * width + 12 * width * context) / seconds


def _seconds(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start
