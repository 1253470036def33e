"""The Mamba-2 mixer: state space duality, split over heads.

Legend: b batch, s sequence, t = b·s, h hidden, c = mamba_expand·h channels in n_h heads of p, g groups of heads, n
state per channel, /tp = this rank's part.

    z, x, B, C, dt = in_proj(u);  x, B, C = silu(conv1d(x, B, C));  dt = softplus(dt + dt_bias)
    out_proj(norm((scan(x, dt, A, B, C) + D x) silu(z)))                 (Dao & Gu 2024, figure 6)

Every part of in_proj is split over ranks by itself. Groups that ranks do not divide (one group is usual) are computed
in parts and gathered: each rank then reads those of its heads. The norm's mean of squares is taken over a whole group
on every layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.layers.carry import Context
from megatron.layers.documents import document_starts
from megatron.layers.init import build_init
from megatron.layers.kv_cache import StateCache
from megatron.layers.mamba_conv import conv_tail
from megatron.layers.mamba_kernels import choose_kernels, steps
from megatron.layers.mamba_parts import (
    DepthwiseConv,
    log_uniform,
    state_parameter,
    step_bias,
)
from megatron.layers.mamba_ssd import ssd_step
from megatron.layers.parts import MIXERS, BlockSpec, Mixer
from megatron.mpu import sharding
from megatron.mpu.collectives import (
    enter_tensor_parallel,
    gather_last_dim,
    leave_tensor_parallel,
    sum_gradient,
)
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.sharding import ParamSpec
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


@MIXERS.register("mamba2")
class Mamba2(Mixer):
    """Submodules and parameters have mamba-ssm's names. `choice`: the kernels in use."""

    uncompiled = ("scan",)

    def __init__(self, model: ModelConfig, state: ParallelState, spec: BlockSpec) -> None:
        super().__init__()
        h, channels, tp = model.hidden_size, model.mamba_expand * model.hidden_size, state.tp_size
        groups, self.n, self.p = model.mamba_n_groups, model.mamba_d_state, model.mamba_head_dim
        heads, shared = channels // self.p, groups * self.n
        self.state = state
        self.heads, self.channels, self.shared = heads // tp, channels // tp, shared // tp
        self.whole_groups = groups % tp == 0
        self.groups = groups // tp if self.whole_groups else groups
        bias = model.mamba_use_bias_in_linears
        kernels = choose_kernels(
            "mamba2",
            state.device,
            conv=model.mamba_causal_conv_fusion,
            scan=model.mamba_selective_scan_fusion,
            inner=False,
            documents=model.intra_document_masking,
            chunk=model.mamba_chunk_size,
        )
        self.scan, self.choice = kernels.scan, kernels.names
        blocks = (channels, shared, shared)
        self.in_proj = ColumnParallelLinear(
            h,
            channels + sum(blocks) + heads,
            state=state,
            init=build_init(model),
            bias=bias,
            blocks=(channels, *blocks, heads),
        )
        self.conv1d = DepthwiseConv(model, state, sum(blocks), blocks, kernels.conv)
        self.dt_bias = sharding.parameter(ParamSpec(shape=(heads,), init=step_bias(model), split_dim=0), state)
        self.A_log = state_parameter(model, state, (heads,), log_uniform)
        self.D = state_parameter(model, state, (heads,), sharding.ones)
        self.norm = GatedRMSNorm(channels, groups, self.p, eps=model.rms_norm_epsilon, state=state)
        self.out_proj = RowParallelLinear(channels, h, state=state, init=build_init(model, residual=True), bias=bias)

    def new_cache(self, capacity: int, start: Tensor | None) -> StateCache:
        return StateCache(start)

    def describe(self) -> tuple[str, str]:
        return "mamba2", self.choice

    def forward(self, x: Tensor, context: Context) -> Tensor:
        (b, s), documents, cache = context.positions.shape, context.documents, context.cache
        everything = self.in_proj(x).view(b, s, -1)
        gate, mixed, dt = everything.split((self.channels, self.channels + 2 * self.shared, self.heads), dim=-1)
        ids = documents.ids if documents is not None and cache is None else None
        real = None if cache is None else cache.real(s)
        tail = None if cache is None else cache.tail
        mixed = mixed if real is None else mixed.masked_fill(~real, 0.0)
        x, b_, c_ = self.conv1d(mixed, ids, tail).split((self.channels, self.shared, self.shared), dim=-1)
        # Padding must not drive the state, and the convolution's bias is no zero.
        x = (x if real is None else x.masked_fill(~real, 0.0)).unflatten(-1, (self.heads, self.p))
        y, last = self._mix(x, dt, self._grouped(b_), self._grouped(c_), ids, None if cache is None else cache.state)
        if cache is not None:
            cache.advance(s, conv_tail(mixed, self.conv1d.taps, tail), last)
        y = torch.addcmul(y, x, self.D.unsqueeze(1))  # fp32 where D is
        return self.out_proj(self.norm(y.reshape(b * s, -1), gate.reshape(b * s, -1)))

    def _mix(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, ids: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The scan of x [b, s, n_h/tp, p], and the state [b, n_h/tp, p, n] behind it."""
        a = -self.A_log.to(torch.promote_types(x.dtype, torch.float32)).exp()
        if x.shape[1] == 1 and state is not None:
            y, state = ssd_step(x[:, 0], steps(dt[:, 0], self.dt_bias), a, b[:, 0], c[:, 0], state)
            return y.unsqueeze(1), state
        return self.scan(x, dt, self.dt_bias, a, b, c, document_starts(ids), state)

    def _grouped(self, part: Tensor) -> Tensor:
        """B or C [b, s, g·n/tp] -> [b, s, groups of this rank's heads, n]."""
        if self.whole_groups:
            return part.unflatten(-1, (self.groups, self.n))
        # Every rank reads it for heads of its own, so the gradients of all of them add up.
        part = sum_gradient(gather_last_dim(part, self.state), self.state, "tensor").unflatten(
            -1, (self.groups, self.n)
        )
        first, per_group = self.state.tp_rank * self.heads, self.heads * self.state.tp_size // self.groups
        if first // per_group == (first + self.heads - 1) // per_group:
            return part[:, :, first // per_group].unsqueeze(2)
        # One group per head: they are not equally many.
        return part[:, :, groups_of_heads(self.heads, self.groups, self.state)]


def groups_of_heads(heads: int, groups: int, state: ParallelState) -> Tensor:
    """The group of each of this rank's `heads` heads, of `groups` in all, int64 [heads]. Made on the device: for a copy
    of numbers the host would wait."""
    first, per_group = state.tp_rank * heads, heads * state.tp_size // groups
    return torch.arange(first, first + heads, device=state.device) // per_group


class GatedRMSNorm(nn.Module):
    """RMSNorm of y silu(z) over each group's channels: [t, c/tp] -> [t, c/tp]; `scale` [c/tp].

    Where ranks do not divide the groups, the mean of squares is taken over all ranks.
    """

    def __init__(self, channels: int, groups: int, head_dim: int, *, eps: float, state: ParallelState) -> None:
        super().__init__()
        self.groups, self.p, self.eps, self.state = groups, head_dim, eps, state
        self.per_group = channels // groups
        self.whole_groups = groups % state.tp_size == 0
        self.scale = sharding.parameter(ParamSpec(shape=(channels,), init=sharding.ones, split_dim=0), state)

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        gated = y.to(wide) * F.silu(gate.to(wide))
        if self.whole_groups:
            parts = gated.unflatten(-1, (-1, self.per_group))
            normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        else:
            heads = gated.unflatten(-1, (-1, self.p))
            normed = heads * torch.rsqrt(self._means(heads) + self.eps).unsqueeze(-1)
        return normed.flatten(-2).to(gate.dtype) * self.scale

    def _means(self, heads: Tensor) -> Tensor:
        """Mean of squares of each head's group: [t, n_h/tp, p] -> [t, n_h/tp]."""
        mine = groups_of_heads(heads.shape[1], self.groups, self.state)
        sums = heads.new_zeros(heads.shape[0], self.groups).index_add(1, mine, heads.square().sum(-1))
        # Leaving and entering is an all-reduce in both directions, with and without sequence parallelism.
        sums = enter_tensor_parallel(leave_tensor_parallel(sums, self.state), self.state)
        return sums[:, mine] / self.per_group
