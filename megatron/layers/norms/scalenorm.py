"""ScaleNorm: one number for all features."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.layers.norms import NORMS, Norm, Region
from megatron.mpu import sharding
from megatron.mpu.state import ParallelState


@NORMS.register("scalenorm", numbers=1)
class ScaleNorm(Norm):
    """g · x / max(‖x‖, eps) with one learned number g (Nguyen & Salazar 2019)."""

    epsilon_key = "scalenorm_epsilon"

    def __init__(self, width: int, *, eps: float, state: ParallelState, region: Region = "sequence") -> None:
        super().__init__(width, eps=eps, state=state, region=region)
        self.g = self._vector(1, sharding.ones)

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).clamp(min=self.eps)
        return (x.float() / length).to(x.dtype) * self._shared(self.g)
