"""Lion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron.optim.optimizers import OPTIMIZERS, Groups


class Lion(Optimizer):
    """Sign of an interpolated momentum (Chen et al. 2023, arXiv 2302.06675, algorithm 2), decoupled decay."""

    def __init__(self, groups: Groups, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum: Tensor = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = momentum.lerp(p.grad, 1 - beta1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - beta2)


@OPTIMIZERS.register("lion", moments=1, params={"betas": (0.9, 0.99)})
def lion(groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    """The sign of an interpolated momentum."""
    return Lion(groups, lr, tuple(params["betas"]))
