"""The spatial gating unit of gMLP and aMLP: tokens see earlier ones through one matrix over positions.

Legend: b batch, s sequence, s_k with the earlier tokens of a cache, t = b·s, f = 4·hidden_size, S = seq_length,
d = gmlp_attn_dim, /tp = this rank's part.

    r, g = x;  g = norm(g);  y_i = r_i · (Σ_{j<=i} W_ij g_j + B_i [+ attention(x)_i])    (Liu et al. 2021, section 2)

W [S, S] starts at 0 and B [S] at 1, so that the unit starts as r. Rows and columns of W are positions, which restart in
packed documents. Channels are split over ranks; the norm is over all of them, so that no layout changes the model
(GPT-NeoX normalises each rank's part). aMLP adds an attention of one head over all channels, the same on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.layers.attention_masks import visible_mask
from megatron.layers.carry import Context
from megatron.layers.kv_cache import LayerCache, left_padded_positions
from megatron.layers.mamba_parts import uniform
from megatron.layers.norms import build_norm
from megatron.mpu import sharding
from megatron.mpu.collectives import enter_tensor_parallel, gather_last_dim, leave_tensor_parallel, sum_gradient
from megatron.mpu.layers import ColumnParallelLinear, linear
from megatron.mpu.sharding import ParamSpec
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


class Whole(nn.Module):
    """`weight` and `bias` as declared, for ranks that each continue with channels of their own."""

    def __init__(self, weight: ParamSpec, bias: ParamSpec, state: ParallelState) -> None:
        super().__init__()
        self.state = state
        self.weight, self.bias = sharding.parameter(weight, state), sharding.parameter(bias, state)

    def whole_bias(self) -> Tensor:
        return sum_gradient(self.bias, self.state, "tensor")


class TinyAttention(nn.Module):
    """One head: `proj_qkv` [3d, 2f/tp], whose partial sums are added up over ranks, and `proj_ffn` [f/tp, d]."""

    def __init__(self, model: ModelConfig, state: ParallelState, width: int) -> None:
        super().__init__()
        d = self.d = model.gmlp_attn_dim
        self.state = state
        narrow, wide = uniform((2 * width) ** -0.5), uniform(d**-0.5)  # those of torch's linear layers
        weight = ParamSpec(shape=(3 * d, 2 * width), init=narrow, split_dim=1, blocks=(width, width))
        self.proj_qkv = Whole(weight, ParamSpec(shape=(3 * d,), init=narrow, sequence_reduced=True), state)
        self.proj_ffn = ColumnParallelLinear(d, width, state=state, init=wide, bias_init=wide)

    def project(self, x: Tensor) -> Tensor:
        """x [t, 2f/tp] -> [t, 3d], the same on every rank."""
        partial = linear(x, self.proj_qkv.weight)
        # Leaving and entering is an all-reduce in both directions, with and without sequence parallelism.
        whole = enter_tensor_parallel(leave_tensor_parallel(partial, self.state), self.state)
        return whole + self.proj_qkv.whole_bias()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """q [b, s, d], k and v [b, s_k, d], seen [b or 1, s, s_k] -> [b, s, f/tp]."""
        q, k, v, seen = (x.unsqueeze(1) for x in (q, k, v, seen))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.d**-0.5).squeeze(1)
        b, s, d = out.shape
        return self.proj_ffn(out.reshape(b * s, d), entered=True).view(b, s, -1)


class SpatialGatingUnit(nn.Module):
    """x [t, 2f/tp] = [r | g] -> [t, f/tp]; parameters `norm`, `proj` and, in aMLP, `attn`, as in GPT-NeoX."""

    def __init__(self, model: ModelConfig, state: ParallelState, *, attends: bool) -> None:
        super().__init__()
        width, longest = 4 * model.hidden_size, model.seq_length
        self.state, self.longest = state, longest
        self.norm = build_norm(model, state, width=width, region="tensor")
        weight = ParamSpec(shape=(longest, longest), init=sharding.zeros, sequence_reduced=True)
        self.proj = Whole(weight, ParamSpec(shape=(longest,), init=sharding.ones, sequence_reduced=True), state)
        self.attn = TinyAttention(model, state, width) if attends else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        positions, documents, cache = context[:3]
        (b, s), device = positions.shape, positions.device
        rest, gate = x.view(b, s, -1).chunk(2, dim=-1)
        gate = self._normalise(gate)
        q = k = v = None
        if self.attn is not None:
            q, k, v = self.attn.project(x).view(b, s, -1).chunk(3, dim=-1)
        ids = start = None
        keys = positions
        if cache is not None:
            gate, k, v = self._remember(cache, gate, k, v)
            start = cache.start
            first = positions.new_zeros(b) if start is None else start
            keys = left_padded_positions(first, 0, gate.shape[1])
        elif documents is not None:
            ids = documents.ids
        seen = visible_mask(s, gate.shape[1], device, doc_ids=ids, key_start=start)[:, 0]
        mixed = self._mix(gate, positions, keys, seen, plain=cache is None and documents is None)
        if self.attn is not None:
            mixed = mixed + self.attn(q, k, v, seen)
        return (mixed * rest).reshape(b * s, -1)

    def _normalise(self, gate: Tensor) -> Tensor:
        """Over the channels of all ranks: [b, s, f/tp] -> the same."""
        if self.state.tp_size == 1:
            return self.norm(gate)
        width = gate.shape[-1]
        whole = self.norm(sum_gradient(gather_last_dim(gate, self.state), self.state, "tensor"))
        return whole.narrow(-1, self.state.tp_rank * width, width)

    def _mix(self, gate: Tensor, rows: Tensor, columns: Tensor, seen: Tensor, *, plain: bool) -> Tensor:
        """gate [b, s_k, f/tp] at positions `columns`, for the tokens at positions `rows`: [b, s, f/tp]."""
        weight, bias = sum_gradient(self.proj.weight, self.state, "tensor"), self.proj.whole_bias()
        if plain:  # columns are positions
            s = rows.shape[1]
            return (weight[:s, :s] * seen) @ gate + bias[:s, None]
        return (weight[rows.unsqueeze(2), columns.unsqueeze(1)] * seen) @ gate + bias[rows].unsqueeze(2)

    def _remember(
        self, cache: LayerCache, gate: Tensor, k: Tensor | None, v: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gates, keys and values of all tokens so far."""
        if cache.length + gate.shape[1] - (0 if cache.start is None else int(cache.start.min())) > self.longest:
            raise UserError(f"gmlp and amlp layers have weights for seq_length {self.longest} positions; ask for less")
        parts = [x for x in (gate, k, v) if x is not None]
        kept, _ = cache.append(torch.cat(parts, dim=-1).unsqueeze(2), gate[:, :, None, :0])
        gate, *rest = kept.squeeze(2).split([part.shape[-1] for part in parts], dim=-1)
        k, v = rest or (None, None)
        return gate, k, v
