"""Builders for packings of whole documents; compiled when the package build produced them, else the same in numpy.

Documents, or pieces of them, are numbered from 0; `lengths` int32 says how many tokens each has, 0 that it is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from megatron.data.index_builders import packing_fallback

try:
    from megatron.data.index_builders import _packing  # type: ignore[attr-defined]
except ImportError:  # no compiler when the package was installed
    _packing = None

_COMPILED_LABELS = (np.dtype(np.int32), np.dtype(np.int64))


@dataclass(frozen=True)
class Patterns:
    """Rows filled alike. Pattern g makes `counts[g]` rows; for each k in `[paths[g], paths[g + 1])` its rows hold
    `copies[k]` pieces of `sizes[k]` tokens, longest first.

    Attributes:
        counts: int64 `[patterns]`, all positive.
        paths: int64 `[patterns + 1]`.
        sizes, copies: int32.
    """

    counts: np.ndarray
    paths: np.ndarray
    sizes: np.ndarray
    copies: np.ndarray

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    def row_starts(self) -> np.ndarray:
        """Where each row begins among the pieces of all rows: int64 `[rows + 1]`."""
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.copies, dtype=np.int64)])
        widths = np.repeat(sums[self.paths[1:]] - sums[self.paths[:-1]], self.counts)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])


def builders() -> ModuleType:
    """The module whose builders are in use."""
    return _packing if _packing is not None else packing_fallback


def overflow_pass(
    lengths: np.ndarray, order: np.ndarray, capacity: int, running: int, limit: int
) -> tuple[int, np.ndarray, int]:
    """Fill rows with documents in the order given, each until the next one would overflow it.

    Args:
        lengths: int32 `[documents]`, at most `capacity`.
        order: int32 or int64, document numbers; the used ones are moved to its front, in place.
        capacity: tokens that a row holds.
        running: tokens in the row that an earlier pass began, 0 when there is none.
        limit: stop where this many rows have begun and another would.

    Returns how many documents were used, the positions among them at which rows begin (int64), and the tokens in the
    last row. Behind the used ones `order` is undefined.
    """
    used, starts, running = builders().overflow_pass(lengths, order, capacity, running, limit)
    return int(used), starts, int(running)


def length_starts(histogram: np.ndarray) -> np.ndarray:
    """Where each length begins among pieces sorted by length: int64 `[capacity + 2]` from int64 `[capacity + 1]`."""
    counts = np.asarray(histogram, dtype=np.int64).copy()
    counts[0] = 0  # unused ones are not sorted
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def by_length(lengths: np.ndarray, starts: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
    """The used pieces sorted by length, equal ones in their order: `[starts[-1]]` of `dtype` (int32 or int64)."""
    out = np.empty(int(starts[-1]), dtype=dtype)
    builders().by_length(lengths, starts, out)
    return out


def fill_patterns(order: np.ndarray, starts: np.ndarray, patterns: Patterns, out: np.ndarray) -> None:
    """Fill `out`, like `order`, with the pieces of all rows, row after row; within a row they are ascending.

    Args:
        order: int32 or int64, pieces sorted by length; those of a length are taken one after the other.
        starts: see `length_starts`.
        patterns: how many pieces of which lengths are in a row.
    """
    builders().fill_patterns(order, starts, patterns.counts, patterns.paths, patterns.sizes, patterns.copies, out)


def any_trained(labels: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """bool `[ranges]`: whether `labels[begins[i] : ends[i]]` holds one that is trained, which is not negative.

    `labels` is `[tokens]` of a signed type; `begins` and `ends` are int64, neither descending.
    """
    out = np.empty(len(begins), dtype=bool)
    module = builders() if labels.dtype in _COMPILED_LABELS else packing_fallback
    module.any_trained(labels, begins, ends, out)
    return out
