"""Gradients of a step of the native engine, and its update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.optim.scaled_step import scaled_step
from megatron.training.native.buckets import Bucket, Slot
from megatron.training.native.fixed_point import FixedPointSums
from megatron.training.partition_comm import GradientSums


class NativeGradients:
    """An `engine_gradients.Gradients` over buckets.

    Args:
        buckets: in the order in which backward passes complete them.
        optimizer: over the masters of the slots.
        passes: backward passes of a step; `end_pass` follows each.
        fixed_point: what adds up the sums of the buckets, if they are in fixed point.
    """

    partitioned = True

    def __init__(
        self,
        buckets: Sequence[Bucket],
        optimizer: torch.optim.Optimizer,
        passes: int,
        fixed_point: FixedPointSums | None = None,
    ) -> None:
        self.buckets = buckets
        self.optimizer = optimizer
        self.fixed_point = fixed_point
        self._sums = GradientSums(buckets, passes, fixed_point.add if fixed_point is not None else None)
        self.end_pass, self.set_passes = self._sums.end_pass, self._sums.set_passes

    def pieces(self) -> Iterator[tuple[Tensor, Parameter]]:
        for bucket in self.buckets:
            bucket.wait()
            bucket.convert()
            for slot in bucket.slots:
                gradient = self._gradient(slot)
                if gradient is not None and slot.owned:
                    yield gradient, slot.parameter

    def _gradient(self, slot: Slot) -> Tensor | None:
        return slot.gradient if slot.total is not None else slot.parameter.grad

    @torch.no_grad()
    def step(self, scale: Tensor | None, found_inf: Tensor, overflow: Tensor) -> None:
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        for slot in slots:
            gradient = self._gradient(slot)
            # No gradient is one of zeros: in fp32 alone, as where sums are kept.
            slot.master.grad = torch.zeros_like(slot.master) if gradient is None else gradient
        scaled_step(self.optimizer, scale, found_inf)
        for bucket in reversed(self.buckets):  # the first layers need theirs first
            bucket.start_publishing()
        for slot in slots:
            slot.master.grad = slot.parameter.grad = None
        self._sums.clear()
        if self.fixed_point is not None:
            self.fixed_point.clear()
