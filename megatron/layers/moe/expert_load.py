"""What is counted in a mixture-of-experts layer while it trains: for metrics, and for balancing by biases.

Legend: t tokens, k experts per token, E experts.

It is counted in the backward pass, which each training micro-batch does once, whereas its forward pass may be repeated
(activation checkpointing), and evaluation has none. Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Load:
    """Sums since `take` was last called, fp64 on the device.

    [E + 4]: assignments to each expert that the router made; of them dropped; sum of the balance losses; sum of the
    z-losses; micro-batches.
    """

    def __init__(self, experts: int, device: torch.device) -> None:
        self.experts = experts
        self._sums = torch.zeros(experts + 4, dtype=torch.float64, device=device)

    def watch(
        self, weights: Tensor, chosen: Tensor, keep: Tensor | None, balance: Tensor | None, z: Tensor | None
    ) -> Tensor:
        """`weights` [t, k] as they are; when their gradient is computed, this micro-batch is counted.

        chosen int64 [t, k]; keep bool [t, k] or None: all are kept; the two losses, None: not computed.
        """
        if not (torch.is_grad_enabled() and weights.requires_grad):
            return weights
        with torch.no_grad():
            found = torch.zeros_like(self._sums)
            flat = chosen.reshape(-1)
            found.scatter_add_(0, flat, torch.ones((), dtype=found.dtype, device=found.device).expand_as(flat))
            if keep is not None:
                found[-4] = (~keep).sum()
            for place, loss in ((-3, balance), (-2, z)):
                if loss is not None:
                    found[place] = loss.detach()
            found[-1].fill_(1.0)
        return _Watch.apply(weights, found, self._sums)

    def take(self) -> Tensor:
        """The sums [E + 4], which start again at zero."""
        sums = self._sums.clone()
        self._sums.zero_()
        return sums


class _Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, found: Tensor, sums: Tensor) -> Tensor:
        ctx.found, ctx.sums = found, sums
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.sums += ctx.found
        return grad, None, None
