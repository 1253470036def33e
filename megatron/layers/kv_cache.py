"""Keys and values of the tokens already seen, for generation.

Legend: b batch, s new tokens, s_max capacity, n_kv/tp key/value heads of this rank, d head dim.

Prompts of different lengths are padded on the LEFT: row i of the batch starts at column `start[i]`, all rows end in
the same column, and every later token of every row lands in the same next column. Column c of row i has position
c - start[i] (`left_padded_positions`). Keys in columns before `start` are never attended to, so pad tokens may have
any valid id.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """One layer's keys and values, allocated on the first append (that call knows dtype and device)."""

    def __init__(self, capacity: int, start: Tensor | None) -> None:
        self.capacity = capacity
        self.start = start
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [b, s, n_kv/tp, d] behind what is there; return all so far [b, length, n_kv/tp, d] (views)."""
        b, s, heads, d = k.shape
        if self.length + s > self.capacity:
            raise ValueError(f"a cache for {self.capacity} tokens cannot take {s} more after {self.length}")
        if self._keys is None:
            self._keys = k.new_empty(b, self.capacity, heads, d)
            self._values = v.new_empty(b, self.capacity, heads, d)
        self._keys[:, self.length : self.length + s] = k
        self._values[:, self.length : self.length + s] = v
        self.length += s
        return self._keys[:, : self.length], self._values[:, : self.length]


class KVCache:
    """One `LayerCache` per layer of a stage, in order; `cache[i]` is what layer i's forward is handed.

    `start` [b] int64: first real column of each row (None: nothing is padded). `capacity`: prompt plus new tokens.
    """

    def __init__(self, layers: int, capacity: int, start: Tensor | None = None) -> None:
        # Without padding no mask is needed, and attention keeps its fast path.
        padded = start is not None and bool((start > 0).any())
        self.layers = [LayerCache(capacity, start if padded else None) for _ in range(layers)]

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def length(self) -> int:
        """Tokens stored so far (columns, padding included)."""
        return max((layer.length for layer in self.layers), default=0)

    def bytes(self) -> int:
        """Memory held by keys and values on this rank."""
        held = [x for layer in self.layers for x in (layer._keys, layer._values) if x is not None]
        return sum(x.numel() * x.element_size() for x in held)


def left_padded_positions(start: Tensor, first: int, count: int) -> Tensor:
    """Positions [b, count] of columns first .. first+count-1 of rows that start at `start` [b]; padding gets 0."""
    columns = torch.arange(first, first + count, device=start.device)
    return (columns.unsqueeze(0) - start.unsqueeze(1)).clamp(min=0)
