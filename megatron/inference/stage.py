"""One pipeline stage of a model, run forward only, with point-to-point of its own.

The training engine is not involved: each rank builds and holds just its stage's tensor-parallel shard.

Shapes: `b` sequences, `s` new tokens (the whole prompt first, then one), `t` = b·s, `h` hidden, `v` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.layers.kv_cache import KVCache
from megatron.mpu.state import ParallelState


class Stage:
    """Runs this rank's layers and passes hidden states to the next stage.

    Args:
        layers: this stage's modules in order; the first stage starts with the embedding, the last ends with the head.
        state: this rank's place in the layout; sequence parallelism must be off (a single token cannot be split).
        hidden_size, dtype: of the hidden states between stages.
        document_ids: the model masks attention across documents, so every layer expects document ids.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        state: ParallelState,
        hidden_size: int,
        dtype: torch.dtype,
        document_ids: bool,
    ) -> None:
        self.layers = [layer.eval() for layer in layers]
        self.state = state
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.document_ids = document_ids
        self._cached = [i for i, layer in enumerate(self.layers) if getattr(layer, "uses_cache", False)]

    def new_cache(self, capacity: int, start: Tensor | None) -> KVCache:
        """A cache for this stage's attention layers. `start`: first real column of each left-padded row."""
        return KVCache(len(self._cached), capacity, start)

    @torch.no_grad()
    def last_logits(self, tokens: Tensor, positions: Tensor, cache: KVCache | None) -> Tensor | None:
        """Logits [b, v] of the last column, on ranks of the last stage; None elsewhere. Collective over the stages.

        Args:
            tokens, positions: [b, s], the same on every rank of the pipe group.
            cache: what `new_cache` gave, or None to run without one (then `tokens` is everything so far).
        """
        first = tokens if self.state.is_first_stage else self._receive(tokens.numel())
        documents = (torch.zeros_like(positions),) if self.document_ids else ()
        carry: Any = (first, positions, *documents)
        slots = {layer: slot for slot, layer in enumerate(self._cached)}
        for i, layer in enumerate(self.layers):
            carry = layer(carry, cache[slots[i]]) if cache is not None and i in slots else layer(carry)
        if not self.state.is_last_stage:
            self._send(carry[0])
            return None
        return carry.last_logits()

    def _neighbour(self, step: int) -> int:
        coord = self.state.topology.coord(self.state.rank)
        return self.state.topology.rank(**{**coord, "pipe": coord["pipe"] + step})

    def _receive(self, tokens: int) -> Tensor:
        hidden = torch.empty(tokens, self.hidden_size, dtype=self.dtype, device=self.state.device)
        dist.recv(hidden, src=self._neighbour(-1))
        return hidden

    def _send(self, hidden: Tensor) -> None:
        dist.send(hidden.contiguous(), dst=self._neighbour(1))

    def share(self, tokens: Tensor | None, size: int) -> Tensor:
        """Broadcast the tokens [b] that the last stage picked to every stage."""
        group = self.state.group("pipe")
        if group is None:
            assert tokens is not None
            return tokens
        if tokens is None:
            tokens = torch.empty(size, dtype=torch.int64, device=self.state.device)
        coord = self.state.topology.coord(self.state.rank)
        source = self.state.topology.rank(**{**coord, "pipe": self.state.pp_size - 1})
        dist.broadcast(tokens, src=source, group=group)
        return tokens
