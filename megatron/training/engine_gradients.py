"""Where DeepSpeed keeps the accumulated gradients of a step: four places, depending on the optimizer it wraps.

A `Gradients` object hides which: it lists this rank's pieces, and applies or drops the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.optim.scaled_step import scaled_step
from megatron.training.engine_bf16 import Bf16Gradients
from megatron.training.engine_zero import ZeroGradients
from megatron.training.native.fixed_point import FixedPointSums


class Gradients(Protocol):
    """Where one kind of optimizer keeps the gradients of a whole step."""

    partitioned: bool  # True when each data-parallel rank holds only its own part
    fixed_point: FixedPointSums | None  # how they were added up, if not in floating point

    def pieces(self) -> Iterator[tuple[Tensor, Parameter]]:
        """The local gradient pieces (accumulation dtype), each with the parameter it belongs to."""
        ...

    def step(self, scale: Tensor | None, found_inf: Tensor, overflow: Tensor) -> None:
        """Apply the update with the gradients x `scale` (0-dim fp32 on the device, None = 1) unless `found_inf` (0-dim
        fp32, 0 or 1: leave weights, moments and update count alone), then clear the gradients. `overflow` (0-dim bool):
        that is because the gradient is not finite, which a loss scale reacts to."""
        ...


class PlainGradients:
    """fp32 without ZeRO: gradients are `p.grad`, the optimizer is a bare torch optimizer."""

    partitioned = False
    fixed_point: FixedPointSums | None = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def pieces(self) -> Iterator[tuple[Tensor, Parameter]]:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield p.grad, p

    def step(self, scale: Tensor | None, found_inf: Tensor, overflow: Tensor) -> None:
        scaled_step(self.optimizer, scale, found_inf)
        # set_to_none: the next backward writes instead of adding, which saves a pass over every gradient.
        self.optimizer.zero_grad(set_to_none=True)


def find_gradients(optimizer: Any, stage: int, passes: int, ranks: int | None) -> Gradients:
    """Those of an optimizer that DeepSpeed wrapped (or left as it is), at the ZeRO stage that runs; see
    `Bf16Gradients`."""
    if type(optimizer).__name__ == "BF16_Optimizer":
        return Bf16Gradients(optimizer, passes, ranks)
    return ZeroGradients(optimizer, stage) if stage >= 1 else PlainGradients(optimizer)
