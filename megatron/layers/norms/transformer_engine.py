"""LayerNorm and RMSNorm by Transformer Engine, with the parameters and numbers of the built-in ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.layers.norms import NORMS, Region
from megatron.layers.norms.layernorm import LayerNorm
from megatron.layers.norms.rmsnorm import RMSNorm
from megatron.layers.transformer_engine import Borrowed, find
from megatron.mpu.state import ParallelState


class _ByEngine:
    """What both share: the module `kind` of Transformer Engine, or None where it cannot run."""

    uncompiled: tuple[str, ...] = ()

    def _borrow(self, kind: str, width: int, eps: float, device: torch.device) -> None:
        engine, self.how = find(device)
        self.uncompiled = () if engine is None else ("forward",)

        def make(dtype: torch.dtype) -> nn.Module:
            made: nn.Module = getattr(engine, kind)(width, eps=eps, dtype=dtype, device="meta")
            return made

        self.kernel = None if engine is None else Borrowed(make)

    def describe(self) -> tuple[str, str]:
        return "Transformer Engine", self.how


@NORMS.register("te_layernorm", vectors=2)
class EngineLayerNorm(_ByEngine, LayerNorm):
    """layernorm by Transformer Engine (te_norm)."""

    def __init__(self, width: int, *, eps: float, state: ParallelState, region: Region = "sequence") -> None:
        super().__init__(width, eps=eps, state=state, region=region)
        self._borrow("LayerNorm", width, eps, state.device)

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is None:
            return super().forward(x)
        out: Any = self.kernel({"weight": self._shared(self.weight), "bias": self._shared(self.bias)}, x)
        return out


@NORMS.register("te_rmsnorm", vectors=1)
class EngineRMSNorm(_ByEngine, RMSNorm):
    """rmsnorm by Transformer Engine (te_norm)."""

    def __init__(self, width: int, *, eps: float, state: ParallelState, region: Region = "sequence") -> None:
        super().__init__(width, eps=eps, state=state, region=region)
        self._borrow("RMSNorm", width, eps, state.device)

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is None:
            return super().forward(x)
        out: Any = self.kernel({"weight": self._shared(self.scale)}, x)
        return out
