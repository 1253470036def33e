"""RWKV-4's two halves of a block: time mixing (in place of attention) and channel mixing (of the feed-forward).

Legend: b batch, s sequence, t = b·s, h hidden, a = dim_att channels, f = ffn_dim, /tp = this rank's part.

    mix(μ) = μ x_t + (1 - μ) x_{t-1}                                              ("token shift", per channel of h)
    time:    output(sigmoid(receptance(mix)) · wkv(key(mix), value(mix)))
    channel: sigmoid(receptance(mix)) · value(relu(key(mix))²)                (Peng et al. 2023, equations 11 to 18)

key, value, receptance, decay and bonus of time mixing are split over channels, those of channel mixing over f and h;
the mixing vectors are held whole. Channel mixing gathers its receptance and multiplies partial sums with it, so that
both halves leave the tensor-parallel region once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from megatron.layers.init import build_init
from megatron.layers.rwkv_wkv import NOTHING, wkv
from megatron.mpu import sharding
from megatron.mpu.collectives import enter_tensor_parallel, gather_last_dim, leave_tensor_parallel, sum_gradient
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.sharding import InitFunction, ParamSpec
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


class Mixing(nn.Module):
    """What both halves share: entering the tensor-parallel region, the token before, mixing vectors."""

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        super().__init__()
        self.state = state
        self.hidden = model.hidden_size

    def vector(self, fill: InitFunction) -> nn.Parameter:
        """[1, 1, h], as published."""
        spec = ParamSpec(shape=(1, 1, self.hidden), init=fill, kind="vector", decay=False, sequence_reduced=True)
        return sharding.parameter(spec, self.state)

    def enter(
        self, x: Tensor, b: int, starts: Tensor | None, real: Tensor | None, before: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x ([t, h], or [t/tp, h]) as [b, s, h], and the token before each: zeros at the start of a text."""
        x = enter_tensor_parallel(x, self.state).view(b, -1, self.hidden)
        x = x if real is None else x.masked_fill(~real, 0.0)
        first = x.new_zeros(b, 1, self.hidden) if before is None else before.unsqueeze(1)
        shifted = torch.cat((first, x[:, :-1]), dim=1)
        return x, shifted if starts is None else shifted.masked_fill(starts.unsqueeze(2), 0.0)

    def blend(self, x: Tensor, shifted: Tensor, mix: Tensor) -> Tensor:
        """[b, s, h] -> [t, h]. Every rank continues with columns of its own, so gradients of the vector add up."""
        return torch.lerp(shifted, x, sum_gradient(mix, self.state, "tensor")).reshape(-1, self.hidden)


class TimeMixing(Mixing):
    """Parameters have the names of BlinkDL's and Hugging Face's; `layer` (from 0) decides how they start."""

    def __init__(self, model: ModelConfig, state: ParallelState, layer: int) -> None:
        super().__init__(model, state)
        h, channels, init = model.hidden_size, model.dim_att, build_init(model)
        depth, left = layer / max(model.num_layers - 1, 1), 1 - layer / model.num_layers
        self.time_decay = self._per_channel(channels, decay(depth))
        self.time_first = self._per_channel(channels, bonus)
        self.time_mix_key = self.vector(mix(left))
        self.time_mix_value = self.vector(mix(left, 0.3 * depth))
        self.time_mix_receptance = self.vector(mix(0.5 * left))
        self.wkv, self.uncompiled = wkv, ("wkv",)
        self.key = ColumnParallelLinear(h, channels, state=state, init=init, bias=False)
        self.value = ColumnParallelLinear(h, channels, state=state, init=init, bias=False)
        self.receptance = ColumnParallelLinear(h, channels, state=state, init=init, bias=False)
        self.output = RowParallelLinear(channels, h, state=state, init=build_init(model, residual=True), bias=False)

    def _per_channel(self, channels: int, fill: InitFunction) -> nn.Parameter:
        spec = ParamSpec(shape=(channels,), init=fill, split_dim=0, kind="vector", decay=False, keep_fp32=True)
        return sharding.parameter(spec, self.state)

    def forward(
        self,
        x: Tensor,
        b: int,
        starts: Tensor | None = None,
        real: Tensor | None = None,
        before: Tensor | None = None,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [t, h] ([t/tp, h] under sequence parallelism) of b texts -> (the same shape, last x [b, h], last state).

        `starts` [b, s]: first tokens of packed documents; `real` [b, s, 1]: tokens that are not padding; `before`,
        `state`: what the last two were behind the tokens before.
        """
        x, shifted = self.enter(x, b, starts, real, before)
        s, wide = x.shape[1], torch.promote_types(x.dtype, torch.float32)
        k = self.key(self.blend(x, shifted, self.time_mix_key), entered=True).view(b, s, -1)
        v = self.value(self.blend(x, shifted, self.time_mix_value), entered=True).view(b, s, -1)
        r = self.receptance(self.blend(x, shifted, self.time_mix_receptance), entered=True).view(b, s, -1)
        if real is not None:
            k, v = k.to(wide).masked_fill(~real, NOTHING), v.masked_fill(~real, 0.0)
        y, state = self.wkv(k, v, -self.time_decay.to(wide).exp(), self.time_first.to(wide), starts=starts, state=state)
        return self.output((torch.sigmoid(r) * y).view(b * s, -1)), x[:, -1], state


class ChannelMixing(Mixing):
    """Parameters have the names of BlinkDL's and Hugging Face's. `add_vectors` and `parts` are those of RWKV-4."""

    def __init__(self, model: ModelConfig, state: ParallelState, layer: int) -> None:
        super().__init__(model, state)
        h, width, init = model.hidden_size, model.ffn_dim, build_init(model)
        self.add_vectors(1 - layer / model.num_layers)
        self.key = ColumnParallelLinear(h, width, state=state, init=init, bias=False)
        self.receptance = ColumnParallelLinear(h, h, state=state, init=init, bias=False)
        self.value = RowParallelLinear(width, h, state=state, init=build_init(model, residual=True), bias=False)

    def add_vectors(self, left: float) -> None:
        """`left`: 1 in the first layer, almost 0 in the last."""
        self.time_mix_key = self.vector(mix(left))
        self.time_mix_receptance = self.vector(mix(left))

    def parts(self, x: Tensor, shifted: Tensor) -> tuple[Tensor, Tensor]:
        """What key and receptance are made from, [t, h] each."""
        return self.blend(x, shifted, self.time_mix_key), self.blend(x, shifted, self.time_mix_receptance)

    def forward(
        self,
        x: Tensor,
        b: int,
        starts: Tensor | None = None,
        real: Tensor | None = None,
        before: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As in `TimeMixing`: (the shape of x, last x [b, h])."""
        x, shifted = self.enter(x, b, starts, real, before)
        for_key, for_receptance = self.parts(x, shifted)
        partial = self.value(F.relu(self.key(for_key, entered=True)).square(), reduce=False)
        r = torch.sigmoid(self.receptance(for_receptance, entered=True))
        # It multiplies a part of the sum on every rank, so the gradients of all of them add up.
        r = sum_gradient(gather_last_dim(r, self.state), self.state, "tensor")
        return leave_tensor_parallel(r * partial, self.state), x[:, -1]


# -- how the vectors start (BlinkDL's RWKV-4, src/model.py; Peng et al. 2023, appendix E) ------------------------------


def decay(depth: float) -> InitFunction:
    """time_decay: from -5 in the first channel to 3 in the last, later for deeper layers (`depth` from 0 to 1)."""

    def fill(full: Tensor, generator: Generator) -> None:
        full.copy_(-5 + 8 * torch.linspace(0, 1, len(full), dtype=full.dtype) ** (0.7 + 1.3 * depth))

    return fill


def bonus(full: Tensor, generator: Generator) -> None:
    """time_first: log 0.3, and 0, 0.5 or -0.5 more in turn."""
    zigzag = (torch.arange(1, len(full) + 1, dtype=full.dtype) % 3 - 1) * 0.5
    full.copy_(zigzag + torch.tensor(0.3, dtype=full.dtype).log())


def mix(power: float, more: float = 0.0) -> InitFunction:
    """A mixing vector: (i / h)^power + more."""

    def fill(full: Tensor, generator: Generator) -> None:
        width = full.shape[-1]
        full.copy_((torch.arange(width, dtype=full.dtype) / width) ** power + more)

    return fill
