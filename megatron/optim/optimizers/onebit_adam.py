"""1-bit Adam, without its compression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron.optim.optimizers import OPTIMIZERS, Groups


class OneBitAdam(Optimizer):
    """1-bit Adam (Tang et al. 2021, arXiv 2102.02888, algorithm 1): Adam without the correction of its biases, whose
    second moments no longer change after `freeze_step` steps.

    From then on the published one sends the signs of momenta; here gradients are reduced as they are, so that a curve
    depends on no layout. DeepSpeed has not had 1-bit Adam since it dropped its compressed communication.
    """

    def __init__(self, groups: Groups, lr: float, betas: tuple[float, float], eps: float, freeze_step: int) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.freeze_step = freeze_step

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                momentum: Tensor = state["exp_avg"].lerp_(p.grad, 1 - beta1)
                if state["step"] < self.freeze_step:
                    state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(momentum, state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-group["lr"])


@OPTIMIZERS.register("onebitadam", moments=2, params={"betas": (0.9, 0.999), "eps": 1e-8, "freeze_step": 100000})
def onebit_adam(groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    """Adam whose second moments are frozen after freeze_step steps; nothing is compressed."""
    return OneBitAdam(groups, lr, tuple(params["betas"]), params["eps"], params["freeze_step"])
