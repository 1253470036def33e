"""SM3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron.optim.optimizers import OPTIMIZERS, Groups


class SM3(Optimizer):
    """SM3-II (Anil et al. 2019, arXiv 1901.11150) with the moving average and momentum of GPT-NeoX's; nothing decays.

        ν = β min_r μ_r + (1 - β) g²;  μ_r = max of ν over r (never smaller with β > 0);  w -= lr g / sqrt(ν + eps)

    over the rows, columns, ... r of a parameter. Their maxima μ are taken from the one tensor `accumulator` of the
    parameter's shape, which checkpoints carry to any layout. A flat piece of ZeRO's has no rows: each weight is a set.
    A tensor-parallel rank takes the maxima over its own shard, so that updates depend on the number of ranks.
    """

    def __init__(self, groups: Groups, lr: float, momentum: float, beta: float, eps: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "beta": beta, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta, momentum = group["beta"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                kept: Tensor = state.setdefault("accumulator", torch.zeros_like(p))
                nu = _smallest_maximum(kept)
                nu = (nu * beta if beta > 0 else nu).addcmul(p.grad, p.grad, value=1 - beta)
                kept.copy_(torch.maximum(kept, nu) if beta > 0 else nu)
                update = (nu + group["eps"]).rsqrt_().mul_(p.grad)
                if momentum > 0:
                    update = state.setdefault("momentum_buffer", torch.zeros_like(p)).lerp_(update, 1 - momentum)
                p.sub_(update, alpha=group["lr"])


def _smallest_maximum(x: Tensor) -> Tensor:
    """Of each entry, the smallest of the maxima of its row, its column, ...: the shape of x."""
    smallest = x
    for dim in range(x.ndim):
        others = [other for other in range(x.ndim) if other != dim]
        maximum = x.amax(others, keepdim=True) if others else x
        smallest = maximum if dim == 0 else torch.minimum(smallest, maximum)
    return smallest.expand_as(x)


@OPTIMIZERS.register(
    "sm3", moments={"always": 1, "momentum": 1}, decays=False, params={"momentum": 0.0, "beta": 0.0, "eps": 1e-30}
)
def sm3(groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    """Second moments bounded by those of rows and columns of each tensor-parallel rank's shard."""
    return SM3(groups, lr, params["momentum"], params["beta"], params["eps"])
