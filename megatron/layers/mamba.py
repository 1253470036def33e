"""The Mamba-1 mixer: a gated selective state space, split over channels.

Legend: b batch, s sequence, t = b·s, h hidden, c = mamba_expand·h channels, n state per channel, r rank of the step
sizes, /tp = this rank's part.

    x, z = in_proj(u);  x = silu(conv1d(x));  dt, B, C = x_proj(x);  dt = softplus(dt_proj(dt))
    out_proj((scan(x, dt, A, B, C) + D x) silu(z))                       (Gu & Dao 2023, figure 3)

in_proj, conv1d, dt_proj, A_log and D are split over channels; x_proj sums over them, so its result is added up over
ranks (GPT-NeoX leaves that sum out, and so computes another model at every model_parallel_size).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.layers.carry import Context
from megatron.layers.documents import document_starts
from megatron.layers.init import build_init
from megatron.layers.kv_cache import StateCache
from megatron.layers.mamba_conv import conv_tail
from megatron.layers.mamba_kernels import choose_kernels, steps
from megatron.layers.mamba_parts import (
    DepthwiseConv,
    count_up,
    state_parameter,
    step_bias,
    uniform,
)
from megatron.layers.mamba_scan import scan_step
from megatron.layers.parts import MIXERS, BlockSpec, Mixer
from megatron.mpu import sharding
from megatron.mpu.collectives import enter_tensor_parallel, leave_tensor_parallel
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, linear
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


@MIXERS.register("mamba")
class Mamba(Mixer):
    """Submodules and parameters have GPT-NeoX's (and mamba-ssm's) names. `choice`: the kernels in use."""

    uncompiled = ("scan", "inner")

    def __init__(self, model: ModelConfig, state: ParallelState, spec: BlockSpec) -> None:
        super().__init__()
        h, channels = model.hidden_size, model.mamba_expand * model.hidden_size
        self.state = state
        self.rank, self.n = model.mamba_dt_rank, model.mamba_d_state
        bias, init = model.mamba_use_bias_in_linears, build_init(model)
        kernels = choose_kernels(
            "mamba",
            state.device,
            conv=model.mamba_causal_conv_fusion,
            scan=model.mamba_selective_scan_fusion,
            # The kernel would sum x_proj over this rank's channels only.
            inner=model.mamba_inner_func_fusion and state.tp_size == 1,
            documents=model.intra_document_masking,
            chunk=model.mamba_chunk_size,
        )
        self.scan, self.inner, self.choice = kernels.scan, kernels.inner, kernels.names
        self.in_proj = ColumnParallelLinear(
            h, 2 * channels, state=state, init=init, bias=bias, blocks=(channels, channels)
        )
        self.conv1d = DepthwiseConv(model, state, channels, (), kernels.conv)
        self.x_proj = RowParallelLinear(
            channels,
            self.rank + 2 * self.n,
            state=state,
            init=init,
            bias=bias and model.mamba_use_bias_in_x_proj,
        )
        self.dt_proj = ColumnParallelLinear(
            self.rank, channels, state=state, init=uniform(self.rank**-0.5), bias_init=step_bias(model)
        )
        self.dt_proj.adaptable = False  # its weight is read without its bias
        self.A_log = state_parameter(model, state, (channels, self.n), count_up)
        self.D = state_parameter(model, state, (channels,), sharding.ones)
        self.out_proj = RowParallelLinear(channels, h, state=state, init=build_init(model, residual=True), bias=bias)

    def new_cache(self, capacity: int, start: Tensor | None) -> StateCache:
        return StateCache(start)

    def describe(self) -> tuple[str, str]:
        return "mamba", self.choice

    def forward(self, x: Tensor, context: Context) -> Tensor:
        (b, s), documents, cache = context.positions.shape, context.documents, context.cache
        both = self.in_proj(x).view(b, s, -1)
        # The kernel reads the weights, and so would leave out what adapters add.
        if self.inner is not None and cache is None and self.x_proj.lora is None and self.out_proj.lora is None:
            return self._fused(both)
        x, gate = both.chunk(2, dim=-1)
        ids = documents.ids if documents is not None and cache is None else None
        real = None if cache is None else cache.real(s)
        tail = None if cache is None else cache.tail
        x = x if real is None else x.masked_fill(~real, 0.0)
        mixed = self.conv1d(x, ids, tail)
        # Padding must not drive the state, and the convolution's bias is no zero.
        mixed = mixed if real is None else mixed.masked_fill(~real, 0.0)
        y, last = self._mix(mixed, ids, None if cache is None else cache.state)
        if cache is not None:
            cache.advance(s, conv_tail(x, self.conv1d.taps, tail), last)
        y = torch.addcmul(y, mixed, self.D) * F.silu(gate)  # fp32 where D is
        return self.out_proj(y.to(x.dtype).reshape(b * s, -1))

    def _mix(self, x: Tensor, ids: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The selective scan of x [b, s, c/tp], and the state [b, n, c/tp] behind it."""
        b, s, channels = x.shape
        # Summed over ranks, and used by each of them for its own channels.
        selected = enter_tensor_parallel(self.x_proj(x.reshape(b * s, channels)), self.state).view(b, s, -1)
        dt, b_, c_ = selected.split((self.rank, self.n, self.n), dim=-1)
        dt = linear(dt, self.dt_proj.weight)
        bias, a = self.dt_proj.bias, -self.A_log.to(torch.promote_types(x.dtype, torch.float32)).exp()
        if s == 1 and state is not None:
            y, state = scan_step(x[:, 0], steps(dt[:, 0], bias), a, b_[:, 0], c_[:, 0], state)
            return y.unsqueeze(1), state
        return self.scan(x, dt, bias, a, b_, c_, document_starts(ids), state)

    def _fused(self, both: Tensor) -> Tensor:
        """Everything behind in_proj in mamba-ssm's kernel."""
        bias = self.conv1d.bias
        out = self.inner(
            both.transpose(1, 2),
            self.conv1d.weight,
            bias,
            self.x_proj.weight,
            self.dt_proj.weight,
            self.out_proj.weight,
            None,
            -self.A_log.float().exp(),
            None,
            None,
            self.D.float(),
            delta_bias=self.dt_proj.bias.float(),
            delta_softplus=True,
        )
        return leave_tensor_parallel(out.reshape(-1, out.shape[-1]), self.state)
