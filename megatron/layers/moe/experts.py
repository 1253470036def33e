"""The experts of a layer: their weights, one tensor for all of them, and what they compute.

Legend: r rows, E experts (/tp on this rank), h hidden, F moe_intermediate_size.

`linear1` [E, 2F, h] holds the rows [up ; gate] of each expert ([E, F, h] with a plain activation), `linear2` [E, h, F];
y = linear2(act(gate) · up). A rank holds whole experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.layers.activations import build_activation
from megatron.layers.init import build_init
from megatron.layers.moe.grouped_linear import Groups, grouped_linear, grouped_types
from megatron.mpu import sharding
from megatron.mpu.sharding import InitFunction, ParamSpec
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


class Experts(nn.Module):
    """linear2(act(linear1(x))) or linear2(act(gate) · up), each row by its own expert."""

    elementwise = ("activate",)

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        super().__init__()
        activation = build_activation(model.activation, bias_gelu_fusion=model.bias_gelu_fusion)
        self.activate = activation.__call__
        self.grouped = grouped_types(state.device)
        experts, h, width = model.moe_num_experts, model.hidden_size, model.moe_intermediate_size
        wide = 2 * width if activation.gated else width

        def make(
            shape: tuple[int, ...], init: InitFunction, kind: str = "matrix", blocks: tuple[int, ...] = ()
        ) -> nn.Parameter:
            spec = ParamSpec(
                shape=(experts, *shape), init=init, split_dim=0, kind=kind, experts=True, expert_blocks=blocks
            )
            return sharding.parameter(spec, state)

        self.linear1 = make((wide, h), build_init(model), blocks=(width, width) if activation.gated else ())
        self.linear2 = make((h, width), build_init(model, residual=True))
        self.bias1 = make((wide,), sharding.zeros, "vector") if model.moe_expert_bias else None
        self.bias2 = make((h,), sharding.zeros, "vector") if model.moe_expert_bias else None

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """[r, h] in groups by expert -> [r, h]."""
        wide = grouped_linear(rows, self.linear1, groups, self.bias1, self.grouped)
        return grouped_linear(self.activate(wide), self.linear2, groups, self.bias2, self.grouped)
