"""Mistakes in generation at a layout."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.inference.stage import Stage
from megatron.layers.kv_cache import LayerCache
from megatron.model import head
from megatron.mpu.state import ParallelState
from tests.mutants.registry import mutant
from tests.training.tiny import Layout

TP = Layout(tp=2)
PP = Layout(pp=2)


@mutant("llama", TP, "logits of text 0", "text")
def logits_of_own_vocabulary() -> Any:
    """Every rank takes its own part of the vocabulary for the whole."""
    return mock.patch.object(head, "gather_last_dim", lambda x, state: torch.cat([x] * state.tp_size, -1))


@mutant("llama", TP, "logits of text 0", "text")
def logits_gathered_in_reverse() -> Any:
    """The parts of the vocabulary are put together in the wrong order."""
    gather = head.gather_last_dim

    def reverse(x: Tensor, state: ParallelState) -> Tensor:
        return torch.cat(gather(x, state).chunk(state.tp_size, -1)[::-1], -1)

    return mock.patch.object(head, "gather_last_dim", reverse)


@mutant("llama", TP, "logits of text 1", "text")
def padding_is_seen() -> Any:
    """Texts see the padding in front of them where heads are split."""
    original = LayerCache.__init__

    def init(self: LayerCache, capacity: int, start: Tensor | None) -> None:
        original(self, capacity, None)

    return mock.patch.object(LayerCache, "__init__", init)


@mutant("learned", PP, "logits of text 1", "text")
def positions_of_columns() -> Any:
    """Positions count the padding in front of a text."""

    def columns(start: Tensor, done: int, s: int) -> Tensor:
        return torch.arange(done, done + s).expand(len(start), s)

    return mock.patch("megatron.inference.running.left_padded_positions", columns)


@mutant("rpe", PP, "logits of text 0", "text")
def table_not_sent() -> Any:
    """A later stage has no table of relative positions but zeros."""
    original = Stage._receive

    def receive(self: Stage, tokens: int) -> Tensor:
        hidden = original(self, tokens)
        self._shared = None if self._shared is None else torch.zeros_like(self._shared)
        return hidden

    return mock.patch.object(Stage, "_receive", receive)


@mutant("llama", Layout(dp=2, tp=2), "tokens of text 0", "text")
def tokens_not_shared() -> Any:
    """Only the rank that picks a token continues with it; the others take token 0."""

    def share(self: Stage, tokens: Tensor | None, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64) if tokens is None else tokens

    return mock.patch.object(Stage, "share", share)
