"""What attention looks at, in two numbers per layer: its largest logit, and the mean entropy of its weights.

Legend: b batch, s queries and keys, n query heads, n_kv key/value heads, d head dim, /tp = this rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from megatron.layers.attention import SelfAttention
from megatron.layers.attention_contract import Call
from megatron.layers.attention_masks import linear_bias, visible_mask
from megatron.mpu.sharding import block_of

SCORES = 2**24  # fp32 scores in memory at a time


def attention_layers(module: nn.Module) -> dict[int, SelfAttention]:
    """The attention layers of a stage by the number of their block, from 0, in order."""
    found = [part for part in module.modules() if isinstance(part, SelfAttention)]
    return {block_of(part.query_key_value.weight): part for part in found}


@contextmanager
def watched_attention(
    layers: Mapping[int, SelfAttention], see: Callable[[int, Tensor, Tensor, Call], None]
) -> Iterator[None]:
    """Inside, `see(block, q, k, call)` is called before each layer attends, with what its back-end is given."""

    def attend(block: int, inner: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        see(block, q, k, call)
        return inner(q, k, v, call)

    kept = {block: layer.attend for block, layer in layers.items()}
    for block, layer in layers.items():
        layer.attend = partial(attend, block, kept[block])
    try:
        yield
    finally:
        for block, layer in layers.items():
            layer.attend = kept[block]


def attention_statistics(q: Tensor, k: Tensor, call: Call, counted: Tensor) -> Tensor:
    """[largest logit, mean entropy in nats] over this rank's heads and the counted queries, fp64, computed in fp32.

    A logit is q · k · scale behind the soft cap, of a key that the query sees; ALiBi and other biases of positions
    count in the weights, and so in the entropy, alone. Queries are taken some at a time, so that memory stays small.

    Args:
        q, k: [b, s, n/tp, d] and [b, s, n_kv/tp, d] of a whole text: without a cache.
        call: as the back-end gets it; causal.
        counted: bool [b or 1, s], some of them true.
    """
    (b, s, n, _), kv_heads = q.shape, k.shape[2]
    queries, keys = q.float().unflatten(2, (kv_heads, n // kv_heads)), k.float()
    largest = torch.full((), -math.inf, dtype=torch.float64, device=q.device)
    entropy = torch.zeros_like(largest)
    step = max(1, SCORES // (b * n * s))
    for first in range(0, s, step):
        last = min(first + step, s)
        seen, rows = _seen(call, first, last, q.device), counted[:, None, first:last, None]
        scores = torch.einsum("bskgd,btkd->bkgst", queries[:, first:last], keys[:, :last]).flatten(1, 2) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        largest = torch.maximum(largest, scores.masked_fill(~(seen & rows), -math.inf).max())
        if call.slopes is not None:
            scores = scores + linear_bias(call.slopes, last - first, last)
        if call.bias is not None:
            scores = scores + call.bias[:, :, first:last, :last].float()
        weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
        entropy += torch.special.entr(weights).sum(-1, keepdim=True).masked_fill(~rows, 0.0).sum(dtype=torch.float64)
    return torch.stack([largest, entropy / (counted.expand(b, s).sum() * n)])


def _seen(call: Call, first: int, last: int, device: torch.device) -> Tensor:
    """bool, broadcastable to [b, 1, last - first, last]: which keys before `last` the queries [first, last) see."""
    seen = visible_mask(last - first, last, device, window=call.window)
    if call.documents is None:
        return seen
    ids = call.documents.ids
    return seen & (ids[:, None, first:last, None] == ids[:, None, None, :last])
