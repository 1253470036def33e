"""What the layers remember of the tokens already seen, for generation: keys and values, or a state of constant size.

Legend: b batch, s new tokens, s_max capacity, n_kv/tp key/value heads of this rank, d head dim.

Prompts of different lengths are padded on the LEFT: row i of the batch starts at column `start[i]`, all rows end in
the same column, and every later token of every row lands in the same next column. Column c of row i has position
c - start[i] (`left_padded_positions`). Columns before `start` are never attended to and never enter a state, so pad
tokens may have any valid id.

Each layer makes its own entry (`new_cache(capacity, start)`), so layers of different kinds can be mixed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class CacheEntry(Protocol):
    """One layer's memory. `length`: columns seen so far, padding included."""

    length: int

    def tensors(self) -> list[Tensor]:
        """What it holds on this rank."""
        ...

    def keep(self, rows: Tensor, first: int) -> None:
        """Forget all other rows, and the columns before `first`."""
        ...

    def join(self, other: Any, length: int) -> None:
        """Take the rows of an entry of the same layer behind its own. `length`: that of the longer one; the other's
        columns move to the right."""
        ...


class LayerCache:
    """One attention layer's keys and values, allocated on the first append (that call knows dtype and device)."""

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
            self._values = v.new_empty(b, self.capacity, *v.shape[2:])
        self._keys[:, self.length : self.length + s] = k
        self._values[:, self.length : self.length + s] = v
        self.length += s
        return self._keys[:, : self.length], self._values[:, : self.length]

    def tensors(self) -> list[Tensor]:
        return [x for x in (self._keys, self._values) if x is not None]

    def keep(self, rows: Tensor, first: int) -> None:
        self.capacity, self.length = self.capacity - first, self.length - first
        self.start = None if self.start is None else self.start[rows] - first
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows, first:], self._values[rows, first:]

    def join(self, other: LayerCache, length: int) -> None:
        mine, theirs = self.tensors(), other.tensors()
        room = max(self.capacity - self.length, other.capacity - other.length)
        starts = [
            (tensors[0].new_zeros(len(tensors[0]), dtype=torch.int64) if one.start is None else one.start)
            + (length - one.length)
            for one, tensors in ((self, mine), (other, theirs))
        ]
        self._keys, self._values = (
            torch.cat([_moved(x, self.length, length, room), _moved(y, other.length, length, room)])
            for x, y in zip(mine, theirs, strict=True)
        )
        self.start, self.length, self.capacity = torch.cat(starts), length, length + room


def _moved(x: Tensor, filled: int, length: int, room: int) -> Tensor:
    """[b, >= filled, n, d] -> [b, length + room, n, d], what is in it now up to column `length`. Padding is zeros:
    attention multiplies values that it does not see by 0."""
    moved = x.new_zeros(x.shape[0], length + room, *x.shape[2:])
    moved[:, length - filled : length] = x[:, :filled]
    return moved


class StateCache:
    """One recurrent layer's memory: the inputs that its convolution still reaches, and its state.

    `tail` and `state` are None before the first tokens; their shapes are the layer's matter. They do not grow.
    """

    def __init__(self, start: Tensor | None) -> None:
        self.start = start
        self.length = 0
        self.tail: Tensor | None = None
        self.state: Tensor | None = None
        self._longest_padding = 0 if start is None else int(start.max())

    def real(self, s: int) -> Tensor | None:
        """bool [b, s, 1]: which of the next s columns are tokens and not padding; None when all of them are."""
        if self.start is None or self.length >= self._longest_padding:
            return None
        columns = torch.arange(self.length, self.length + s, device=self.start.device)
        return (columns.unsqueeze(0) >= self.start.unsqueeze(1)).unsqueeze(2)

    def advance(self, s: int, tail: Tensor, state: Tensor) -> None:
        """Take what the layer remembers after s more columns."""
        self.length += s
        self.tail, self.state = tail, state

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.tail, self.state) if x is not None]

    def keep(self, rows: Tensor, first: int) -> None:
        self.length -= first
        self._after_padding()
        self.tail, self.state = (None if x is None else x[rows] for x in (self.tail, self.state))

    def join(self, other: StateCache, length: int) -> None:
        self.length = length
        self._after_padding()
        pairs = ((self.tail, other.tail), (self.state, other.state))
        self.tail, self.state = (None if x is None or y is None else torch.cat([x, y]) for x, y in pairs)

    def _after_padding(self) -> None:
        """All columns that are padding have been seen."""
        self.start, self._longest_padding = None, 0


class KVCache:
    """One entry per layer of a stage that keeps one, in order (`layers`).

    `start` [b] int64: first real column of each row (None: nothing is padded). `capacity`: prompt plus new tokens.
    """

    def __init__(self, layers: Iterable[nn.Module], capacity: int, start: Tensor | None = None) -> None:
        # Without padding no mask is needed, and attention keeps its fast path.
        padded = start if start is not None and bool((start > 0).any()) else None
        self.layers: list[CacheEntry] = [
            layer.new_cache(capacity, padded) for layer in layers if getattr(layer, "uses_cache", False)
        ]

    @property
    def length(self) -> int:
        """Tokens stored so far (columns, padding included)."""
        return max((layer.length for layer in self.layers), default=0)

    def keep(self, rows: Tensor, first: int) -> None:
        """Forget all but these rows [b'] of the batch, and the columns before `first`, which are padding in all of
        them."""
        for layer in self.layers:
            layer.keep(rows, first)

    def join(self, other: KVCache) -> None:
        """Take the rows of a cache of the same layers behind one's own. All rows end in the same column, as before."""
        length = max(self.length, other.length)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.join(theirs, length)

    def bytes(self) -> int:
        """Memory that the layers' entries hold on this rank."""
        return sum(x.numel() * x.element_size() for layer in self.layers for x in layer.tensors())


def left_padded_positions(start: Tensor, first: int, count: int) -> Tensor:
    """Positions [b, count] of columns first .. first+count-1 of rows that start at `start` [b]; padding gets 0."""
    columns = torch.arange(first, first + count, device=start.device)
    return (columns.unsqueeze(0) - start.unsqueeze(1)).clamp(min=0)
