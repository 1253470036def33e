"""Schedule-free AdamW and SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron.optim.optimizers import OPTIMIZERS, Groups


class ScheduleFree(Optimizer):
    """Schedule-free learning (Defazio et al. 2024, arXiv 2405.15682, algorithm 1), decay at y.

    Gradients are taken at y = (1 - beta) z + beta x, the weights in training; z takes plain steps, x is their average,
    each with the share (k + 1)^r lr_max^p of all so far: the weights that are evaluated. With `betas` a step of z is
    AdamW's without its momentum, else the gradient.

    `z` is kept; x follows from y and z.
    """

    def __init__(self, groups: Groups, lr: float, params: dict[str, Any]) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.beta, self.beta2 = params["betas"] if "betas" in params else (params["momentum"], None)
        self.eps, self.r, self.power = params.get("eps", 0.0), params["r"], params["weight_lr_power"]

    def average(self, values: Mapping[str, Tensor]) -> Tensor:
        """x, a new tensor."""
        return values["weight"].lerp(values["z"], 1 - 1 / self.beta)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, weight_sum=0.0, lr_max=0.0, z=p.clone())
                    if self.beta2 is not None:
                        state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                state["lr_max"] = max(state["lr_max"], group.get("scheduled_lr", group["lr"]))
                weight = state["step"] ** self.r * state["lr_max"] ** self.power
                state["weight_sum"] += weight
                share = weight / state["weight_sum"] if state["weight_sum"] else 0.0
                direction = self._direction(p.grad, state).add(p, alpha=group["weight_decay"])
                p.lerp_(state["z"], share).add_(direction, alpha=group["lr"] * (self.beta * (1 - share) - 1))
                state["z"].sub_(direction, alpha=group["lr"])

    def _direction(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if self.beta2 is None:
            return gradient
        squares = state["exp_avg_sq"].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        return gradient / (squares / (1 - self.beta2 ** state["step"])).sqrt_().add_(self.eps)


@OPTIMIZERS.register(
    "schedule_free_adamw",
    moments=2,
    averages=True,
    params={"betas": (0.9, 0.999), "eps": 1e-8, "r": 0.0, "weight_lr_power": 2.0},
)
def schedule_free_adamw(groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    """AdamW whose averaged weights, which are evaluated and saved, take the place of a falling learning rate."""
    return ScheduleFree(groups, lr, params)


@OPTIMIZERS.register(
    "schedule_free_sgd", moments=1, averages=True, params={"momentum": 0.9, "r": 0.0, "weight_lr_power": 2.0}
)
def schedule_free_sgd(groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    """Gradient descent whose averaged weights, which are evaluated and saved, take the place of a falling learning
    rate."""
    return ScheduleFree(groups, lr, params)
