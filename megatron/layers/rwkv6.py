"""RWKV-6's two halves of a block (Peng et al. 2024, arXiv 2404.05892, "Finch"); see rwkv.py for what they share.

Legend: b batch, s sequence, t = b·s, h hidden, a = dim_att channels in n heads of d = head_size, /tp = this rank's.

How much of the token before goes into each input, and how fast each channel's memory fades, depends on the token:

    mix_i = x + (x' - x) (μ_i + tanh((x + (x' - x) μ_x) A) B_i)     x' the token before; i = w, k, v, r, g; rank of A 32
    w = -exp(time_decay + tanh(mix_w C) D)          rank of C 64
    output(group_norm(wkv(r, k, v, w, time_faaaa)) · silu(gate(mix_g)))

Heads are split over tensor-parallel ranks; mixing vectors and A, B, C are held whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from megatron.layers.init import build_init
from megatron.layers.mamba_parts import uniform
from megatron.layers.rwkv import ChannelMixing, Mixing
from megatron.layers.rwkv_wkv6 import wkv6
from megatron.mpu import sharding
from megatron.mpu.collectives import sum_gradient
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.sharding import InitFunction, ParamSpec
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.block_sizes import RWKV6_DECAY_RANK, RWKV6_MIX_RANK

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

_INPUTS = "wkvrg"  # the order of B
_EPSILON = 64e-5  # of the norm of heads: published as 1e-5 · 8²


class TimeMixing6(Mixing):
    """Parameters have the names of BlinkDL's and GPT-NeoX's; `layer` (from 0) decides how they start."""

    def __init__(self, model: ModelConfig, state: ParallelState, layer: int) -> None:
        super().__init__(model, state)
        self.wkv, self.uncompiled = wkv6, ("wkv",)
        h, a, d, init = model.hidden_size, model.dim_att, model.head_size, build_init(model)
        depth, left = layer / max(model.num_layers - 1, 1), 1 - layer / model.num_layers
        self.d = d
        for name in ("x", *_INPUTS):
            fill = maa(0.5 * left) if name in "rg" else maa(left, 0.3 * depth if name == "v" else 0.0)
            setattr(self, f"time_maa_{name}", self.vector(fill))
        small = uniform(1e-4)
        self.time_maa_w1 = self._small((h, len(_INPUTS) * RWKV6_MIX_RANK), small)
        self.time_maa_w2 = self._small((len(_INPUTS), RWKV6_MIX_RANK, h), small)
        self.time_decay = self._small((1, 1, a), decay(depth), split=2, wide=True)
        self.time_decay_w1 = self._small((h, RWKV6_DECAY_RANK), small)
        self.time_decay_w2 = self._small((RWKV6_DECAY_RANK, a), small, split=1)
        self.time_faaaa = self._small((a // d, d), bonus(depth), split=0, wide=True)
        self.receptance, self.key, self.value, self.gate = (
            ColumnParallelLinear(h, a, state=state, init=init, bias=False) for _ in range(4)
        )
        self.ln_x = HeadNorm(a, d, state)
        self.output = RowParallelLinear(a, h, state=state, init=build_init(model, residual=True), bias=False)

    def _small(
        self, shape: tuple[int, ...], fill: InitFunction, split: int | None = None, wide: bool = False
    ) -> nn.Parameter:
        """What neither decays nor is orthogonalised."""
        spec = ParamSpec(
            shape=shape,
            init=fill,
            split_dim=split,
            kind="vector",
            decay=False,
            sequence_reduced=split is None,
            keep_fp32=wide,
        )
        return sharding.parameter(spec, self.state)

    def _whole(self, weight: Tensor) -> Tensor:
        """A weight held whole: every rank continues with heads of its own, so gradients add up."""
        return sum_gradient(weight, self.state, "tensor")

    def forward(
        self,
        x: Tensor,
        b: int,
        starts: Tensor | None = None,
        real: Tensor | None = None,
        before: Tensor | None = None,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As in `rwkv.TimeMixing`; the state is [b, n/tp, d, d]."""
        x, shifted = self.enter(x, b, starts, real, before)
        s, wide = x.shape[1], torch.promote_types(x.dtype, torch.float32)
        inputs = self._inputs(x, shifted)  # of padding 0, and so are its keys
        fades = torch.tanh(inputs["w"] @ self._whole(self.time_decay_w1)) @ self.time_decay_w2
        # Above 7 a decay is 0 in every type; an infinite one would make its gradient undefined.
        w = -(self.time_decay.view(-1).to(wide) + fades.to(wide)).clamp(max=7.0).exp()
        r, k, v = (
            part(inputs[name], entered=True).view(b, s, -1, self.d)
            for name, part in (("r", self.receptance), ("k", self.key), ("v", self.value))
        )
        w, u = w.view(b, s, -1, self.d), self.time_faaaa.to(wide)
        y, state = self.wkv(r, k, v, w, u, starts=starts, state=state)
        gate = F.silu(self.gate(inputs["g"], entered=True))
        return self.output(self.ln_x(y.reshape(b * s, -1)) * gate), x[:, -1], state

    def _inputs(self, x: Tensor, shifted: Tensor) -> dict[str, Tensor]:
        """What each projection reads, [t, h], by its letter."""
        x, change = x.reshape(-1, self.hidden), (shifted - x).reshape(-1, self.hidden)
        rough = x + change * self._whole(self.time_maa_x).view(-1)
        low = torch.tanh(rough @ self._whole(self.time_maa_w1)).view(len(x), len(_INPUTS), -1)
        more = torch.bmm(low.transpose(0, 1), self._whole(self.time_maa_w2))  # [5, t, h]
        return {
            name: x + change * (self._whole(getattr(self, f"time_maa_{name}")).view(-1) + more[i])
            for i, name in enumerate(_INPUTS)
        }


class HeadNorm(nn.Module):
    """LayerNorm of each head by itself: [t, a/tp] -> the same; `weight`, `bias` [a/tp]."""

    def __init__(self, channels: int, d: int, state: ParallelState) -> None:
        super().__init__()
        self.d = d
        ones, zeros = (ParamSpec(shape=(channels,), init=fill, split_dim=0) for fill in (sharding.ones, sharding.zeros))
        self.weight, self.bias = sharding.parameter(ones, state), sharding.parameter(zeros, state)

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, x.shape[1] // self.d, self.weight, self.bias, _EPSILON)


class ChannelMixing6(ChannelMixing):
    """That of RWKV-4 with the mixing vectors the other way round: 1 is the token before."""

    def add_vectors(self, left: float) -> None:
        self.time_maa_k = self.vector(maa(left))
        self.time_maa_r = self.vector(maa(left))

    def parts(self, x: Tensor, shifted: Tensor) -> tuple[Tensor, Tensor]:
        return self.blend(shifted, x, self.time_maa_k), self.blend(shifted, x, self.time_maa_r)


# -- how the vectors start (BlinkDL's RWKV-6, src/model.py) -----------------------------------------------------------


def maa(power: float, more: float = 0.0) -> InitFunction:
    """A mixing vector: 1 - (i / h)^power - more."""

    def fill(full: Tensor, generator: Generator) -> None:
        width = full.shape[-1]
        full.copy_(1 - (torch.arange(width, dtype=full.dtype) / width) ** power - more)

    return fill


def decay(depth: float) -> InitFunction:
    """time_decay: from -6 in the first channel to -1 in the last, later for deeper layers (`depth` from 0 to 1)."""

    def fill(full: Tensor, generator: Generator) -> None:
        full.copy_(-6 + 5 * torch.linspace(0, 1, full.shape[-1], dtype=full.dtype) ** (0.7 + 1.3 * depth))

    return fill


def bonus(depth: float) -> InitFunction:
    """time_faaaa: falling over the channels in deep layers, and 0, 0.1 or -0.1 more in turn."""

    def fill(full: Tensor, generator: Generator) -> None:
        zigzag = (torch.arange(1, full.numel() + 1, dtype=full.dtype) % 3 - 1) * 0.1
        falling = depth * torch.linspace(1, 0, full.numel(), dtype=full.dtype)
        full.copy_((falling + zigzag).view(full.shape))

    return fill
