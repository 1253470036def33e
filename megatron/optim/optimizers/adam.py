"""Adam."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from megatron.optim.optimizers import OPTIMIZERS, Groups


@OPTIMIZERS.register(
    "adam", "adamw", "cpu_torch_adam", "cpu_adam", moments=2, params={"betas": (0.9, 0.999), "eps": 1e-8}
)
def adamw(groups: Groups, lr: float, params: dict[str, Any]) -> Optimizer:
    """torch's fused AdamW: one kernel over all tensors, where they are (offload_optimizer: on the CPU)."""
    return torch.optim.AdamW(groups, lr=lr, betas=tuple(params["betas"]), eps=params["eps"], fused=True)
