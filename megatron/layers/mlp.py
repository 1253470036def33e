"""The feed-forward layer, plain and gated.

Legend: t = b·s, h hidden, F = ffn_width, /tp = this rank's part.

Gated: the fused weight `linear1` has the rows [up ; gate], each split over ranks by itself, so a rank holds
[up/tp ; gate/tp]; y = linear2(act(gate) · up).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.layers.activations import build_activation
from megatron.layers.init import build_init
from megatron.layers.measure import size_of
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.state import ParallelState
from megatron.registry import Registry

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

MLPS: Registry[Callable[..., nn.Module]] = Registry(
    "mlp_config",
    wants="a class of modules",
    fits=callable,
    measure=lambda name, model: size_of(lambda state: MLPS[name](model, state)),
)
"""Kinds of feed-forward. An entry is a class of modules:

* it is made as `entry(model, state)`; every parameter by `mpu.sharding.parameter` or a layer of `mpu.layers`, with its
  full shape, so that it starts, is saved and is read at any layout; it is built on torch's meta device too;
* `forward(x, entered=, reduce=)`: [t, h] -> [t, h] ([t/tp, h] under sequence parallelism). With `entered` x has entered
  the tensor-parallel region already; without `reduce` the result is the rank's partial sum without bias. Both are for
  the parallel forms of a block alone (gpt_j_residual), and so is `add_bias(total)`;
* each token's output depends on that token alone;
* a static method `size(model) -> block_sizes.Size`, if it has one, says its parameters; else they are counted.
"""


@MLPS.register("dense")
class DenseMLP(nn.Module):
    """linear2(act(linear1(x))) or linear2(act(gate) · up); the activation decides which.

    `width` and `bias`: instead of ffn_width and use_bias_in_mlp.
    """

    def __init__(
        self, model: ModelConfig, state: ParallelState, *, width: int | None = None, bias: bool | None = None
    ) -> None:
        super().__init__()
        activation = build_activation(model.activation, bias_gelu_fusion=model.bias_gelu_fusion)
        self.function, self.gated = activation.function, activation.gated
        h, width = model.hidden_size, width or model.ffn_width
        bias = model.use_bias_in_mlp if bias is None else bias
        self.linear1 = ColumnParallelLinear(
            h,
            2 * width if self.gated else width,
            state=state,
            init=build_init(model),
            bias=bias,
            blocks=(width, width) if self.gated else (),
        )
        self.linear2 = RowParallelLinear(width, h, state=state, init=build_init(model, residual=True), bias=bias)

    def forward(self, x: Tensor, *, entered: bool = False, reduce: bool = True) -> Tensor:
        """[t, h] ([t/tp, h] under sequence parallelism) -> the same; `entered` and `reduce` as in mpu.layers."""
        wide = self.linear1(x, entered=entered)
        if self.gated:
            up, gate = wide.chunk(2, dim=-1)
            wide = self.function(gate) * up
        else:
            wide = self.function(wide)
        return self.linear2(wide, reduce=reduce)

    def add_bias(self, y: Tensor) -> Tensor:
        """What `reduce=False` leaves out, to be added once the partial sums are reduced."""
        return self.linear2.add_bias(y)
