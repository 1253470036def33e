"""Vectors of the tokens that are added to the values of attention.

Legend: b batch, s sequence, t = b·s, h hidden, n_kv key/value heads, d head dim, v vocabulary, /tp = this rank's part.

Zhou et al. 2024 (arXiv 2410.17897) mix the first layer's values into all; modded-nanogpt and nanochat have a table of
their own in some layers instead, and gates that see the token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.layers.init import build_init
from megatron.mpu import sharding
from megatron.mpu.sharding import ParamSpec
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.block_sizes import VALUE_GATE_CHANNELS

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


class ValueEmbeddings(nn.Module):
    """2 sigmoid(G x[:12]) · E[token], head by head: `weight` [v, n_kv·d/tp] (E) and `gate` [n_kv/tp, 12] (G).

    Split by heads and not by tokens, as the values are: ranks exchange nothing. G starts at 0, so gates at 1.
    """

    def __init__(self, model: ModelConfig, state: ParallelState, vocab_size: int) -> None:
        super().__init__()
        heads, width = model.num_kv_heads, model.num_kv_heads * model.head_dim
        self.d, self.channels = model.head_dim, min(VALUE_GATE_CHANNELS, model.hidden_size)
        table = ParamSpec(
            shape=(vocab_size, width), init=build_init(model, hidden_matrix=False), split_dim=1, kind="embedding"
        )
        self.weight = sharding.parameter(table, state)
        # No matrix of the hidden states: AdamW's where others are Muon's, and without decay.
        gate = ParamSpec(shape=(heads, self.channels), init=sharding.zeros, split_dim=0, kind="vector")
        self.gate = sharding.parameter(gate, state)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """tokens [b, s] and x [t, h], the input of the layer's projections -> [b, s, n_kv/tp, d], to be added."""
        found = F.embedding(tokens, self.weight).unflatten(-1, (-1, self.d))
        gates = 2 * torch.sigmoid(F.linear(x[:, : self.channels], self.gate))
        return found * gates.view(*tokens.shape, -1, 1)
