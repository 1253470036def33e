"""RMSNorm, with weights around 1 or around 0."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron.layers.norms import NORMS, Norm, Region
from megatron.mpu import sharding
from megatron.mpu.state import ParallelState


@NORMS.register("rmsnorm", vectors=1)
class RMSNorm(Norm):
    """x / sqrt(mean(x²) + eps) · scale: epsilon inside the root, as LLaMA and its conversions have it."""

    epsilon_key = "rms_norm_epsilon"

    def __init__(self, width: int, *, eps: float, state: ParallelState, region: Region = "sequence") -> None:
        super().__init__(width, eps=eps, state=state, region=region)
        self.scale = self._vector(width, sharding.ones)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), self._shared(self.scale), self.eps)


@NORMS.register("rmsnorm_unit_offset", vectors=1)
class UnitOffsetRMSNorm(Norm):
    """x / sqrt(mean(x²) + eps) · (1 + scale), in fp32 up to the cast (Gemma): `scale` starts at 0, and small values of
    it keep their precision in bf16."""

    epsilon_key = "rms_norm_epsilon"

    def __init__(self, width: int, *, eps: float, state: ParallelState, region: Region = "sequence") -> None:
        super().__init__(width, eps=eps, state=state, region=region)
        self.scale = self._vector(width, sharding.zeros)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (self.width,), 1.0 + self._shared(self.scale).float(), self.eps).to(x.dtype)
