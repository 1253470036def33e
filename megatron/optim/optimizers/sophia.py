"""Sophia."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron.optim.optimizers import OPTIMIZERS, Groups


class Sophia(Optimizer):
    """Sophia-G (Liu et al. 2023, arXiv 2305.14342, algorithm 3), decoupled decay:

        m <- beta1 m + (1 - beta1) g;  w -= lr clip(m / max(rho h, eps), -1, 1)

    h is a moving average of estimates of the Hessian's diagonal (Gauss-Newton-Bartlett, algorithm 2): B g'², g' the
    gradient of the mean loss of B tokens with targets drawn from the model. The engine takes these passes.

    Attributes:
        curvature_every: steps from one estimate to the next.
        estimated_tokens: B while a step is an estimate, which moves nothing but h; else None.
    """

    def __init__(self, groups: Groups, lr: float, params: dict[str, Any]) -> None:
        super().__init__(groups, {"lr": lr, "betas": tuple(params["betas"]), "weight_decay": 0.0})
        self.rho, self.eps = params["rho"], params["eps"]
        self.curvature_every: int = params["hessian_interval"]
        self.estimated_tokens: int | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), hessian=torch.zeros_like(p))
                hessian: Tensor = state["hessian"]
                if self.estimated_tokens is not None:
                    hessian.mul_(beta2).addcmul_(p.grad, p.grad, value=(1 - beta2) * self.estimated_tokens)
                    continue
                state["step"] += 1
                momentum: Tensor = state["exp_avg"].lerp_(p.grad, 1 - beta1)
                update = momentum / (hessian * self.rho).clamp_(min=self.eps)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.clamp_(-1, 1), alpha=group["lr"])


@OPTIMIZERS.register(
    "sophia",
    moments=2,
    curvature=True,
    params={"betas": (0.965, 0.99), "rho": 0.04, "eps": 1e-12, "hessian_interval": 10},
)
def sophia(groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    """Momentum over an estimate of the Hessian's diagonal, clipped; every hessian_interval steps take two passes."""
    return Sophia(groups, lr, params)
