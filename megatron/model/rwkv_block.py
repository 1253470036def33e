"""A residual block of RWKV-4 or RWKV-6: x + time_mixing(norm(x)), then x + channel_mixing(norm(x)); the first of a
network normalises the embeddings before.

It is compiled around its recurrence, a loop over the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.layers.carry import Context
from megatron.layers.documents import document_starts
from megatron.layers.kv_cache import CacheEntry, StateCache
from megatron.layers.norms import build_norm
from megatron.layers.parts import BlockSpec
from megatron.layers.rwkv import ChannelMixing, TimeMixing
from megatron.layers.rwkv6 import ChannelMixing6, TimeMixing6
from megatron.model.block import BLOCKS, Block
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


_HALVES = {"rwkv4": (TimeMixing, ChannelMixing), "rwkv": (TimeMixing6, ChannelMixing6)}


@BLOCKS.register(*_HALVES)
class RwkvBlock(Block):
    def __init__(self, model: ModelConfig, state: ParallelState, spec: BlockSpec) -> None:
        super().__init__(model, state)
        time_mixing, channel_mixing = _HALVES[spec.kind]
        self.pre_layernorm = build_norm(model, state) if spec.layer == 0 else None
        self.input_layernorm = build_norm(model, state)
        self.time_mixing = time_mixing(model, state, spec.layer)
        self.post_attention_layernorm = build_norm(model, state)
        self.channel_mixing = channel_mixing(model, state, spec.layer)

    def new_cache(self, capacity: int, start: Tensor | None) -> CacheEntry:
        return StateCache(start)

    def residual(self, x: Tensor, context: Context) -> tuple[Tensor, None]:
        (b, s), documents, cache = context.positions.shape, context.documents, context.cache
        starts, real, tails, state = None, None, None, None
        if cache is None:
            starts = document_starts(None if documents is None else documents.ids)
        else:
            real, tails, state = cache.real(s), cache.tail, cache.state
        # The last token of each half's input [b, 2, h], and the state of time mixing.
        before = (None, None) if tails is None else tails.unbind(1)
        x = x if self.pre_layernorm is None else self.pre_layernorm(x)
        change, last, state = self.time_mixing(self.input_layernorm(x), b, starts, real, before[0], state)
        x = x + self._drop(change)
        change, other = self.channel_mixing(self.post_attention_layernorm(x), b, starts, real, before[1])
        if cache is not None:
            cache.advance(s, torch.stack((last, other), dim=1), state)
        return x + self._drop(change), None
