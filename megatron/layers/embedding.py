"""Layer 0: token ids to hidden states.

Legend: b batch, s sequence, t = b·s, h hidden, v vocabulary, /tp = this rank's part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron.layers.carry import Carry
from megatron.layers.dropout import hidden_dropout
from megatron.layers.init import build_init
from megatron.layers.parts import adds_loss
from megatron.layers.positions import POSITIONS
from megatron.mpu.layers import VocabParallelEmbedding
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


class Embedding(nn.Module):
    """Word embeddings, plus position embeddings where the scheme has them, then dropout.

    `word_embeddings.weight` [v/tp, h]; `position_embeddings.weight` [max_position_embeddings, h] if learned;
    `shared_positions.weight` [buckets, n/tp] if relative.
    """

    def __init__(self, model: ModelConfig, state: ParallelState, *, vocab_size: int, padded_vocab_size: int) -> None:
        super().__init__()
        self.state = state
        self.dropout = model.hidden_dropout if model.embedding_dropout is None else model.embedding_dropout
        self.multiplier = model.mup_embedding_mult if model.use_mup else 1.0
        self.width_scale = model.hidden_size**0.5 if model.scale_embedding else None
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            padded_vocab_size,
            model.hidden_size,
            state=state,
            init=build_init(model, hidden_matrix=False),
        )
        self.adds_loss = adds_loss(model)
        self.hands_tokens = model.value_embedding_interval > 0
        scheme = POSITIONS[model.pos_emb]
        self.position_embeddings = None if scheme.at_embedding is None else scheme.at_embedding(model, state)
        self.shared_positions = None if scheme.shared is None else scheme.shared(model, state)

    def forward(self, carry: Carry) -> Carry:
        """The carry with the token ids [b, s] -> with their hidden states."""
        hidden = self.word_embeddings(carry.hidden)
        if self.width_scale is not None:
            # As a tensor, so that the factor is rounded to bf16 where the model is bf16, as Gemma was trained.
            hidden = hidden * torch.full((), self.width_scale, dtype=hidden.dtype, device=hidden.device)
        if self.position_embeddings is not None:
            # An fp32 table (sinusoids) must not widen the residual stream of a bf16 model.
            hidden = hidden + self.position_embeddings(carry.positions).to(hidden.dtype)
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        hidden = hidden_dropout(hidden, self.dropout, self.training, self.state)
        balance = None
        if self.adds_loss:
            # It takes a gradient: every stage of a pipeline sends one for each floating-point tensor that it received.
            balance = torch.zeros((), device=hidden.device, requires_grad=torch.is_grad_enabled())
        shared = None if self.shared_positions is None else self.shared_positions()
        tokens = carry.hidden if self.hands_tokens else None
        return carry._replace(hidden=hidden, balance=balance, shared=shared, tokens=tokens)
