"""MADGRAD with decoupled weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron.optim.optimizers import OPTIMIZERS, Groups


class Madgrad(Optimizer):
    """Dual averaging with cube roots (Defazio & Jelassi 2021, arXiv 2101.11075, algorithm 1), as GPT-NeoX's madgrad_wd.

    With γ = lr + eps and λ = γ sqrt(k + 1) in step k = 0, 1, ...: w decays by γ; s += λ g, ν += λ g²; z = x0 - s /
    (cbrt(ν) + eps); w moves towards z by 1 - momentum. x0 is w at the start; without momentum it follows from s and ν.
    """

    def __init__(self, groups: Groups, lr: float, momentum: float, eps: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            eps, momentum, rate = group["eps"], group["momentum"], group["lr"] + group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, grad_sum_sq=torch.zeros_like(p), s=torch.zeros_like(p))
                    if momentum:
                        state["x0"] = p.clone()
                squares: Tensor = state["grad_sum_sq"]
                weight = rate * float(state["step"] + 1) ** 0.5
                p.mul_(1 - rate * group["weight_decay"])
                start = state["x0"] if momentum else p.addcdiv(state["s"], squares.pow(1 / 3).add_(eps))
                squares.addcmul_(p.grad, p.grad, value=weight)
                state["s"].add_(p.grad, alpha=weight)
                target = start.addcdiv(state["s"], squares.pow(1 / 3).add_(eps), value=-1)
                p.mul_(momentum).add_(target, alpha=1 - momentum)
                state["step"] += 1


@OPTIMIZERS.register("madgrad_wd", moments={"always": 2, "momentum": 1}, params={"momentum": 0.9, "eps": 1e-6})
def madgrad(groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    """Dual averaging with cube roots of the second moments."""
    return Madgrad(groups, lr, params["momentum"], params["eps"])
