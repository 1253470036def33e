"""A block of gMLP or aMLP: output_linear(gate(act(input_linear(norm(x))))), instead of attention and feed-forward.

As GPT-NeoX computes it, whose block has no residual connection and adds no biases (the published one has both).
Parameter names are GPT-NeoX's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron.layers.activations import build_activation
from megatron.layers.carry import Context
from megatron.layers.gmlp import SpatialGatingUnit
from megatron.layers.init import build_init
from megatron.layers.norms import build_norm
from megatron.layers.parts import BlockSpec
from megatron.model.block import BLOCKS, Block
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


@BLOCKS.register("gmlp", "amlp")
class GMLPBlock(Block):
    def __init__(self, model: ModelConfig, state: ParallelState, spec: BlockSpec) -> None:
        super().__init__(model, state)
        h = model.hidden_size
        self.norm = build_norm(model, state)
        self.function = build_activation(model.activation, bias_gelu_fusion=model.bias_gelu_fusion).function
        self.input_linear = ColumnParallelLinear(
            h, 8 * h, state=state, init=build_init(model), bias=False, blocks=(4 * h, 4 * h)
        )
        self.sgu = SpatialGatingUnit(model, state, attends=spec.kind == "amlp")
        self.output_linear = RowParallelLinear(4 * h, h, state=state, init=build_init(model, residual=True), bias=False)

    def residual(self, x: Tensor, context: Context) -> tuple[Tensor, None]:
        return self.output_linear(self.sgu(self.function(self.input_linear(self.norm(x))), context)), None
