"""Norm and feed-forward in one module of Transformer Engine: `te_layernorm_mlp`.

Legend: t tokens, h hidden, F = ffn_width, /tp = this rank's part.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.layers.carry import Context
from megatron.layers.mlp import DenseMLP
from megatron.layers.norms import Norm
from megatron.layers.norms.layernorm import LayerNorm
from megatron.layers.norms.rmsnorm import RMSNorm
from megatron.layers.parts import MLPS
from megatron.layers.transformer_engine import Borrowed, find
from megatron.mpu.collectives import enter_tensor_parallel, leave_tensor_parallel, sum_gradient
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

# Ours -> theirs. Gated ones are not here: their module wants the rows [gate ; up], a layer holds [up ; gate].
ACTIVATIONS = {
    **dict.fromkeys(("gelu_tanh", "gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu"),
    **dict.fromkeys(("relu2", "squared_relu"), "srelu"),
    **dict.fromkeys(("silu", "swish"), "silu"),
    "relu": "relu",
    "quick_gelu": "qgelu",
}


class FusedFeedForward:
    """x [t, h] before the norm -> this rank's part of linear2(act(linear1(norm(x)))) without the last bias [t, h].

    x has entered the tensor-parallel region: every rank normalises all tokens and sees the gradient of its own columns,
    so the norm's gradient is summed over ranks.
    """

    def __init__(
        self, engine: ModuleType, norm: Norm, activation: str, first: ColumnParallelLinear, second: RowParallelLinear
    ) -> None:
        # Held in a tuple, so that they do not become parts of the layer a second time.
        self._parts = (norm, first, second)

        def make(dtype: torch.dtype) -> nn.Module:
            made: nn.Module = engine.LayerNormMLP(
                norm.width,
                first.weight.shape[0],
                eps=norm.eps,
                bias=first.bias is not None,
                normalization="RMSNorm" if isinstance(norm, RMSNorm) else "LayerNorm",
                activation=activation,
                return_bias=first.bias is not None,
                params_dtype=dtype,
                device="meta",
            )
            return made

        self._module = Borrowed(make)

    def __call__(self, x: Tensor) -> Tensor:
        norm, first, second = self._parts
        weight = norm.scale if isinstance(norm, RMSNorm) else norm.weight
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        out = self._module(
            {
                "layer_norm_weight": sum_gradient(weight, norm.state, "tensor"),
                "layer_norm_bias": None if bias is None else sum_gradient(bias, norm.state, "tensor"),
                "fc1_weight": first.weight,
                "fc1_bias": first.bias,
                "fc2_weight": second.weight,
                # Given back by the module instead of added: RowParallelLinear adds the real one after the reduction.
                "fc2_bias": None if second.bias is None else second.bias.detach(),
            },
            x,
        )
        partial: Tensor = out[0] if isinstance(out, tuple) else out
        return partial


@MLPS.register("te_layernorm_mlp")
class EngineMLP(DenseMLP):
    """The dense feed-forward, with the block's norm in one module where Transformer Engine has one that fits; else its
    products, or the built-in ones."""

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        super().__init__(model, state)
        self.state = state
        self.engine, self._how = find(state.device)
        self.uncompiled = () if self.engine is None else ("forward",)
        tanh = model.activation == "gelu" and model.bias_gelu_fusion
        self.name = ACTIVATIONS.get("gelu_tanh" if tanh else model.activation)
        self.fused: FusedFeedForward | None = None

    def take_norm(self, norm: Norm) -> bool:
        if self.engine is not None and self.name is not None and isinstance(norm, (LayerNorm, RMSNorm)):
            self.fused = FusedFeedForward(self.engine, norm, self.name, self.linear1, self.linear2)
        return self.fused is not None

    def describe(self) -> tuple[str, str]:
        return "Transformer Engine", self._how

    def forward(
        self, x: Tensor, context: Context | None = None, *, entered: bool = False, reduce: bool = True
    ) -> tuple[Tensor, None]:
        if self.fused is None:
            return super().forward(x, context, entered=entered, reduce=reduce)
        partial = self.fused(x if entered else enter_tensor_parallel(x, self.state))
        return (self.add_bias(leave_tensor_parallel(partial, self.state)) if reduce else partial), None
