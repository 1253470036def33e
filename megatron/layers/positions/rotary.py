"""Rotary positions.

Legend: b batch, s sequence, n heads, d head dim, r rotated dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.layers.positions import POSITIONS, PositionScheme, Table
from megatron.layers.positions.rope_scaling import attention_factor, frequencies, switch_length
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


class Rotary(Table):
    """Rotary embedding (Su et al. 2021, arXiv 2104.09864) in the rotate-half layout on the first r dims of a head.

    Tables [positions, r/2]; the product is taken in fp32 and cast back. Where long texts have other frequencies
    (longrope), their rows follow the others.
    """

    elementwise = ("forward",)

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


POSITIONS.register("rotary", table=None, rotates=True, doc="Rotary embedding of queries and keys.")(
    PositionScheme(in_attention=Rotary.of)
)
