"""The feed-forward layer, plain and gated.

Legend: t = b·s, h hidden, F = ffn_width, /tp = this rank's part.

Gated: the fused weight `linear1` has the rows [up ; gate], each split over ranks by itself, so a rank holds
[up/tp ; gate/tp]; y = linear2(act(gate) · up).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron.layers.activations import build_activation
from megatron.layers.carry import Context
from megatron.layers.init import build_init
from megatron.layers.parts import MLPS, FeedForward
from megatron.layers.transformer_engine.linear import engine_recipes
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


@MLPS.register("dense")
class DenseMLP(FeedForward):
    """linear2(act(linear1(x))) or linear2(act(gate) · up); the activation decides which.

    `width` and `bias`: instead of ffn_width and use_bias_in_mlp.
    """

    elementwise = ("activate",)

    def __init__(
        self, model: ModelConfig, state: ParallelState, *, width: int | None = None, bias: bool | None = None
    ) -> None:
        super().__init__()
        activation = build_activation(model.activation, bias_gelu_fusion=model.bias_gelu_fusion)
        self.activate = activation.__call__
        h, width = model.hidden_size, width or model.ffn_width
        bias = model.use_bias_in_mlp if bias is None else bias
        column, row = engine_recipes(model, state.device, both=model.te_layernorm_mlp)
        self.linear1 = ColumnParallelLinear(
            h,
            2 * width if activation.gated else width,
            state=state,
            init=build_init(model),
            bias=bias,
            blocks=(width, width) if activation.gated else (),
            recipe=column,
        )
        init = build_init(model, residual=True)
        self.linear2 = RowParallelLinear(width, h, state=state, init=init, bias=bias, recipe=row)

    def forward(
        self, x: Tensor, context: Context | None = None, *, entered: bool = False, reduce: bool = True
    ) -> tuple[Tensor, None]:
        return self.linear2(self.activate(self.linear1(x, entered=entered)), reduce=reduce), None

    def add_bias(self, total: Tensor) -> Tensor:
        return self.linear2.add_bias(total)
