"""Fixed sines and cosines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.layers.positions import POSITIONS, PositionScheme, Table
from megatron.mpu.collectives import split_sequence
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


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


POSITIONS.register("sinusoidal", table=None, doc="Fixed sines and cosines, added to the word embeddings.")(
    PositionScheme(at_embedding=SinusoidalPositions)
)
