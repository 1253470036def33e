"""Numbers that the device still has to work out: copied to the host behind that work, and read when they are there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LateNumbers:
    """Numbers of which some are tensors: the copy of those starts here, `read` waits for it alone.

    What the device was given after this was made is not waited for: read with the next step, nothing waits at all.

    Args:
        numbers: numbers, or tensors of one element, each on any device.
    """

    def __init__(self, numbers: Sequence[float | Tensor]) -> None:
        self._numbers = list(numbers)
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        for place, number in enumerate(numbers):
            if isinstance(number, Tensor):
                by_device.setdefault(number.device, {})[place] = number
        self._copies = [_Copy(tensors) for tensors in by_device.values()]

    def read(self) -> list[float]:
        """All numbers, in order."""
        for copy in self._copies:
            for place, value in zip(copy.places, copy.read(), strict=True):
                self._numbers[place] = value
        return [float(x) for x in self._numbers]


class _Copy:
    """Tensors of one device, by their places among the numbers, on their way to the host."""

    def __init__(self, tensors: dict[int, Tensor]) -> None:
        self.places = list(tensors)
        self._host = torch.stack([x.detach().reshape(()).double() for x in tensors.values()])
        self._copied: torch.cuda.Event | None = None
        if self._host.is_cuda:
            device = self._host.device
            pinned = torch.empty(len(tensors), dtype=torch.float64, pin_memory=True)
            self._host = pinned.copy_(self._host, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def read(self) -> list[float]:
        """Wait for the copy alone."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy().tolist()
