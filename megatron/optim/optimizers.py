"""Optimizers by `optimizer.type`. All decay decoupled from the gradient, as NeoX's FusedAdam does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron.errors import UserError
from megatron.registry import Registry

Groups = list[dict[str, Any]]
Builder = Callable[[Groups, float, dict[str, Any]], Optimizer]
OPTIMIZERS: Registry[Builder] = Registry(
    "optimizer.type", wants="a function (groups, lr, params) -> torch.optim.Optimizer", fits=callable
)
"""Builders of optimizers. An entry is a function `(groups, lr, params) -> torch.optim.Optimizer`:

* `groups` from `groups.parameter_groups`, each with its `weight_decay`, which is decoupled; `params` holds betas, eps
  and momentum of `optimizer.params`, and the keys of `entry.params` ({name: type}), if it has that attribute;
* the learning rate is read from each group at every step; gradients are clipped already;
* what it keeps of a parameter is tensors of the parameter's shape in `state[p]`, and `step` if it counts, so that
  checkpoints carry it to any layout.
"""


@OPTIMIZERS.register("adam", "adamw", "cpu_torch_adam")
def adamw(groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    """torch's fused AdamW: one kernel over all tensors, on CPU and GPU, and no compiler at start-up."""
    return torch.optim.AdamW(
        groups, lr=lr, betas=tuple(params.get("betas", (0.9, 0.999))), eps=params.get("eps", 1e-8), fused=True
    )


@OPTIMIZERS.register("sgd")
def sgd(groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    """Stochastic gradient descent with optional momentum."""
    return torch.optim.SGD(
        groups, lr=lr, momentum=params.get("momentum", 0.0), nesterov=params.get("nesterov", False), foreach=True
    )


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


@OPTIMIZERS.register("lion")
def lion(groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    return Lion(groups, lr, tuple(params.get("betas", (0.9, 0.99))))


def build_optimizer(kind: str, groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    """The optimizer called `kind` in YAML (case and underscores as in NeoX) over parameter groups.

    Raises:
        UserError: unknown `kind`, or parameters without any group (a stage that trains nothing).
    """
    if not groups:
        raise UserError("this pipeline stage has no parameters to train; use fewer stages (pipe_parallel_size)")
    return OPTIMIZERS[kind if kind in OPTIMIZERS else kind.lower()](groups, lr, params)
