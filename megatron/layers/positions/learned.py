"""Learned positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.layers.init import build_init
from megatron.layers.positions import POSITIONS, PositionScheme
from megatron.mpu import sharding
from megatron.mpu.collectives import split_sequence, sum_gradient
from megatron.mpu.sharding import ParamSpec
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


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


POSITIONS.register("learned", table=("max_position_embeddings", "hidden_size"), doc="A learned vector per position.")(
    PositionScheme(at_embedding=LearnedPositions)
)
