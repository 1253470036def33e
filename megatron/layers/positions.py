"""How a model knows where a token stands: rotary, learned, sinusoidal, ALiBi or nothing.

Legend: b batch, s sequence, t = b·s, h hidden, n heads, d head dim, r rotated dims. `positions` is [b, s] int64 and
restarts at each document under intra-document masking, so every scheme indexes by it and never by the column.

A scheme may act in three places: added to the word embeddings, applied to queries and keys, or as a slope on the
attention scores. `POSITIONS` maps `pos_emb` to the factories of those parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.layers.init import build_init
from megatron.layers.measure import size_of
from megatron.layers.rope_scaling import attention_factor, frequencies, switch_length
from megatron.mpu import sharding
from megatron.mpu.collectives import split_sequence, sum_gradient
from megatron.mpu.sharding import ParamSpec
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.block_sizes import Size
from megatron.registry import Registry

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


@dataclass(frozen=True)
class PositionScheme:
    """Factories of a scheme's parts; None where it does nothing.

    * `at_embedding(model, state)`: module, positions [b, s] -> [t, h] ([t/tp, h] under sequence parallelism).
    * `in_attention(model, state)`: module, (x [b, s, n, d], positions) -> the same shape.
    * `slopes(model)`: fp32 [n], one per query head: score(i, j) -= slope · (i - j).
    """

    at_embedding: Callable[[ModelConfig, ParallelState], nn.Module] | None = None
    in_attention: Callable[[ModelConfig, ParallelState], nn.Module] | None = None
    slopes: Callable[[ModelConfig], Tensor] | None = None


POSITIONS: Registry[PositionScheme] = Registry(
    "pos_emb",
    wants="a PositionScheme of megatron.layers.positions",
    fits=lambda entry: isinstance(entry, PositionScheme),
    measure=lambda name, model: _size(POSITIONS[name], model),
)
"""`PositionScheme`s. They index by `positions` alone, which restart in each document and skip padding; what acts in
attention is one module for all layers and has no parameters; parameters of `at_embedding` are made by
`mpu.sharding.parameter`.
"""


def _size(scheme: PositionScheme, model: ModelConfig) -> Size:
    make = scheme.at_embedding
    return Size() if make is None else size_of(lambda state: make(model, state))


POSITIONS.register("none")(PositionScheme())


class Table(nn.Module):
    """fp32 tables built once that stay fp32 when an engine casts the model (`model.bfloat16()`)."""

    def __init__(self, **tables: Tensor) -> None:
        super().__init__()
        for name, table in tables.items():
            self.register_buffer(name, table.float(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Table:
        # A bf16 table would merge neighbouring positions: take the new device, not the new dtype.
        for name, table in list(self._buffers.items()):
            self._buffers[name] = table.to(fn(table.new_empty(0)).device)
        return self


class Rotary(Table):
    """Rotary embedding (Su et al. 2021, arXiv 2104.09864) in the rotate-half layout on the first r dims of a head.

    Tables [positions, r/2]; the product is taken in fp32 and cast back. Where long texts have other frequencies
    (longrope), their rows stand behind the others.
    """

    def __init__(
        self, dims: int, base: float, length: int, device: torch.device, scaling: Mapping[str, Any] | None = None
    ) -> None:
        self.length, switch = length, switch_length(scaling)
        sets = [frequencies(dims, base, scaling, long=long) for long in ((False,) if switch is None else (False, True))]
        places = torch.arange(length, dtype=torch.float32)
        angle = torch.cat([torch.outer(places, frequency) for frequency in sets])
        factor = attention_factor(scaling, length)
        super().__init__(cos=(angle.cos() * factor).to(device), sin=(angle.sin() * factor).to(device))
        self.dims, self.switch = dims, switch

    @classmethod
    def of(cls, model: ModelConfig, state: ParallelState) -> Rotary:
        dims = int(model.head_dim * model.rotary_pct)
        if dims < 2 or dims % 2:
            raise UserError(
                f"rotary_pct: {model.rotary_pct} of the head dimension {model.head_dim} is {dims} rotated dimensions; "
                "choose a fraction that gives an even number of at least 2"
            )
        length = model.max_position_embeddings
        return cls(dims, float(model.rotary_emb_base), length, state.device, model.rope_scaling)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        rows = self._rows(positions)
        cos, sin = self.cos[rows].unsqueeze(2), self.sin[rows].unsqueeze(2)  # [b, s, 1, r/2]
        first, second = x[..., : self.dims].float().chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
        return rotated if self.dims == x.shape[-1] else torch.cat((rotated, x[..., self.dims :]), dim=-1)

    def _rows(self, positions: Tensor) -> Tensor:
        """[b, s] -> the tables' rows [b, s], by the length of each text; a text begins where positions do."""
        if self.switch is None:
            return positions
        text = (positions == 0).cumsum(1)
        last = positions.new_zeros(len(positions), positions.shape[1] + 1).scatter_reduce(1, text, positions, "amax")
        return torch.where(last.gather(1, text) >= self.switch, positions + self.length, positions)


POSITIONS.register("rotary")(PositionScheme(in_attention=Rotary.of))


class LearnedPositions(nn.Module):
    """A learned vector per position: `weight` [max_position_embeddings, h], read at position + offset (OPT uses 2)."""

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        super().__init__()
        if model.seq_length + model.opt_pos_emb_offset > model.max_position_embeddings:
            raise UserError(
                f"max_position_embeddings: {model.max_position_embeddings} rows do not hold seq_length "
                f"{model.seq_length} plus opt_pos_emb_offset {model.opt_pos_emb_offset}"
            )
        self.state = state
        self.offset = model.opt_pos_emb_offset
        self.multiplier = model.mup_rp_embedding_mult if model.use_mup else 1.0
        spec = ParamSpec(
            shape=(model.max_position_embeddings, model.hidden_size),
            init=build_init(model, hidden_matrix=False),
            sequence_reduced=True,
            kind="embedding",
        )
        self.weight = sharding.parameter(spec, state)

    def forward(self, positions: Tensor) -> Tensor:
        mine = split_sequence(positions.reshape(-1), self.state)
        return F.embedding(mine + self.offset, sum_gradient(self.weight, self.state)) * self.multiplier


POSITIONS.register("learned")(PositionScheme(at_embedding=LearnedPositions))


class SinusoidalPositions(Table):
    """Fixed [sin | cos] of position / 10000^(2i/h) (Vaswani et al. 2017, in GPT-NeoX's half/half order)."""

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        if model.hidden_size % 2:
            raise UserError(f"pos_emb: sinusoidal needs an even hidden_size, not {model.hidden_size}")
        frequency = 10000.0 ** (-torch.arange(0, model.hidden_size, 2, dtype=torch.float64) / model.hidden_size)
        length = model.max_position_embeddings + model.opt_pos_emb_offset
        angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
        super().__init__(table=torch.cat((angle.sin(), angle.cos()), dim=-1).to(state.device))
        self.state = state
        self.offset = model.opt_pos_emb_offset
        self.multiplier = model.mup_rp_embedding_mult if model.use_mup else 1.0

    def forward(self, positions: Tensor) -> Tensor:
        mine = split_sequence(positions.reshape(-1), self.state)
        return self.table[mine + self.offset] * self.multiplier


POSITIONS.register("sinusoidal")(PositionScheme(at_embedding=SinusoidalPositions))


def alibi_slopes(heads: int) -> list[float]:
    """One slope per head: 2^(-8i/n) for a power of two n; else those of the power below, filled up with every second
    slope of the power above (Press et al. 2021, arXiv 2108.12409)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-4.0 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return slopes + between[: heads - power]


def _slopes(model: ModelConfig) -> Tensor:
    return torch.tensor(alibi_slopes(model.num_attention_heads), dtype=torch.float32)


POSITIONS.register("alibi")(PositionScheme(slopes=_slopes))
