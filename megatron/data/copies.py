"""Batches on their way to a GPU: the copy of one runs while the device works on the one before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from megatron.data.batch import StepBatch


class Copies(Protocol):
    """How a batch gets to a device."""

    def start(self, batch: StepBatch) -> StepBatch:
        """Begin to copy; what is returned must not be used before `arrive`."""
        ...

    def arrive(self, batch: StepBatch) -> None:
        """Make the device, and not the host, wait for the copy of a batch that `start` returned."""
        ...


class CudaCopies:
    """Copies on a stream of their own; the host waits for none if the batches are in page-locked memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def start(self, batch: StepBatch) -> StepBatch:
        """See `Copies`."""
        with torch.cuda.stream(self.stream):
            return batch.to(self.device, non_blocking=True)

    def arrive(self, batch: StepBatch) -> None:
        """See `Copies`."""
        step = torch.cuda.current_stream(self.device)
        step.wait_stream(self.stream)
        for tensor in batch.tensors().values():
            tensor.record_stream(step)  # its memory is the other stream's, which must not reuse it before the step


def copy_ahead(batches: Iterator[StepBatch], copies: Copies) -> Iterator[StepBatch]:
    """The same batches on the device; the copy of each starts before the one in front of it is given out."""
    started: StepBatch | None = None
    for batch in batches:
        if started is not None:
            copies.arrive(started)  # before the next copy starts, which nothing has to wait for yet
        before, started = started, copies.start(batch)
        if before is not None:
            yield before
    if started is not None:
        copies.arrive(started)
        yield started
