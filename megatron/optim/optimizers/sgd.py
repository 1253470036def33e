"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from megatron.optim.optimizers import OPTIMIZERS, Groups


@OPTIMIZERS.register("sgd", moments={"momentum": 1}, params={"momentum": 0.0, "nesterov": False})
def sgd(groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    """Stochastic gradient descent with optional momentum."""
    momentum, nesterov = params["momentum"], params["nesterov"]
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, foreach=True)
