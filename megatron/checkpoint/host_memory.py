"""Memory of the host for copies of what a rank saves, made once and used again for each of them; and such a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.checkpoint.layer_files import SavingEngine
from megatron.log import get_logger

logger = get_logger(__name__)

_ALIGNMENT = 64  # bytes, of each tensor in it


class HostMemory:
    """Grows to what the largest copy so far took.

    Args:
        locked: page-locked, so that a GPU copies into it at the speed of its bus: for tensors on one. What cannot be
            locked (`ulimit -l`) is used all the same.
    """

    def __init__(self, locked: bool) -> None:
        self.locked = locked
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copy(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Copies of tensors on any device, valid until the next call; returns when all are done."""
        needed = sum(map(_room, values))
        if needed > self._bytes.numel():
            self._grow(needed)
        copies, start = [], 0
        for value in values:
            place = self._bytes[start : start + value.nbytes].view(value.dtype).view(value.shape)
            copies.append(place.copy_(value.detach(), non_blocking=True))
            start += _room(value)
        for device in {value.device for value in values if value.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _grow(self, needed: int) -> None:
        if self.locked and self._bytes.numel():
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes = torch.empty(0, dtype=torch.uint8)  # the old one is free before there is a new one
        self._bytes = torch.empty(needed, dtype=torch.uint8)
        if self.locked:
            # torch's own page-locked memory comes in powers of two: up to twice what is needed.
            problem = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), needed, 0)
            if int(problem) != 0:
                self.locked = False
                logger.warning(
                    f"{needed:,} bytes cannot be page-locked (CUDA error {int(problem)}; ulimit -l is the limit): "
                    "copies for async_save are slower"
                )


class CopiedEngine:
    """What saving asks of an engine, as it was when this was made: a thread may ask while the engine goes on.

    Args:
        beat: called at every sign of progress of who saves it.
        held: which parameters are saved.
    """

    def __init__(
        self, engine: SavingEngine, memory: HostMemory, beat: Callable[[], None], held: Callable[[Parameter], bool]
    ) -> None:
        self.beat = beat
        self._params, self._scalars = {n: p for n, p in engine.params().items() if held(p)}, engine.scalars()
        self._shares = {name: engine.share(name) for name in self._params}
        there = {name: engine.read_share(name) for name in self._params}
        copies = iter(memory.copy([value for share in there.values() for value in share.values()]))
        self._values = {name: {key: next(copies) for key in share} for name, share in there.items()}

    def params(self) -> Mapping[str, Parameter]:
        return self._params

    def scalars(self) -> dict[str, Any]:
        return self._scalars

    def share(self, name: str) -> range:
        return self._shares[name]

    def read_share(self, name: str) -> dict[str, Tensor]:
        return self._values[name]


def _room(value: Tensor) -> int:
    return -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
