"""Where DeepSpeed keeps the accumulated gradients of a step: four places, depending on the optimizer it wraps.

A `Gradients` object hides which: it lists this rank's pieces, and applies or drops the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.training.engine_zero import Bf16Gradients, ZeroGradients


class Gradients(Protocol):
    """Where one kind of optimizer keeps the gradients of a whole step."""

    partitioned: bool  # True when each data-parallel rank holds only its own part

    def pieces(self) -> Iterator[tuple[Tensor, Parameter]]:
        """The local gradient pieces (accumulation dtype), each with the parameter it belongs to."""
        ...

    def step(self, skip: bool) -> None:
        """Apply the update (or drop the gradients when `skip`), then clear the gradients."""
        ...


class PlainGradients:
    """fp32 without ZeRO: gradients are `p.grad`, the optimizer is a bare torch optimizer."""

    partitioned = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def pieces(self) -> Iterator[tuple[Tensor, Parameter]]:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield p.grad, p

    def step(self, skip: bool) -> None:
        if not skip:
            self.optimizer.step()
        # set_to_none: the next backward writes instead of adding, which saves a pass over every gradient.
        self.optimizer.zero_grad(set_to_none=True)


def find_gradients(optimizer: Any, stage: int) -> Gradients:
    """Those of an optimizer that DeepSpeed wrapped (or left as it is), at the ZeRO stage that runs."""
    if type(optimizer).__name__ == "BF16_Optimizer":
        return Bf16Gradients(optimizer)
    return ZeroGradients(optimizer, stage) if stage >= 1 else PlainGradients(optimizer)
