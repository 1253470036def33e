"""LayerNorm, with and without parameters."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron.layers.norms import NORMS, Norm, Region
from megatron.mpu import sharding
from megatron.mpu.state import ParallelState


@NORMS.register("layernorm", vectors=2)
class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) · weight + bias."""

    def __init__(self, width: int, *, eps: float, state: ParallelState, region: Region = "sequence") -> None:
        super().__init__(width, eps=eps, state=state, region=region)
        self.weight = self._vector(width, sharding.ones)
        self.bias = self._vector(width, sharding.zeros)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,), self._shared(self.weight), self._shared(self.bias), self.eps)


@NORMS.register("non_parametric_layernorm", vectors=0)
class NonParametricLayerNorm(Norm):
    """LayerNorm without weight and bias (OLMo 1)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,), None, None, self.eps)
