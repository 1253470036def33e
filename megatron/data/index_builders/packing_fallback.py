"""The packing builders in numpy: the same arrays as the native ones, for machines without a C++ compiler."""

from __future__ import annotations

import numpy as np

CHUNK_TOKENS = 1 << 22  # labels read at a time


def overflow_pass(
    lengths: np.ndarray, order: np.ndarray, capacity: int, running: int, limit: int
) -> tuple[int, np.ndarray, int]:
    """See `packing.overflow_pass`."""
    used = order[lengths[order] > 0]
    order[: len(used)] = used
    tokens = lengths[used].astype(np.int64)
    ends = np.cumsum(tokens)
    before = ends - tokens
    # Where the row ends that begins at each entry: the first entry whose end is beyond it.
    jump = np.searchsorted(ends, before + capacity, side="right").tolist()
    at = 0 if running == 0 else int(np.searchsorted(ends, capacity - running, side="right"))
    starts: list[int] = []
    while at < len(used) and len(starts) < limit:
        starts.append(at)
        at = jump[at]
    kept = min(at, len(used))
    begun = int(before[starts[-1]]) if starts else -running
    running = int(ends[kept - 1]) - begun if kept else running
    return kept, np.asarray(starts, dtype=np.int64), running


def by_length(lengths: np.ndarray, starts: np.ndarray, out: np.ndarray) -> None:
    """See `packing.by_length`."""
    used = np.flatnonzero(lengths)
    keys = lengths[used].astype(np.uint16) if len(starts) <= 2**16 else lengths[used]  # 16 bits are sorted by radix
    out[:] = used[np.argsort(keys, kind="stable")]


def fill_patterns(
    order: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    paths: np.ndarray,
    sizes: np.ndarray,
    copies: np.ndarray,
    out: np.ndarray,
) -> None:
    """See `packing.fill_patterns`: all rows of a pattern at once."""
    cursor = starts.tolist()
    begins, lengths, many = paths.tolist(), sizes.tolist(), copies.tolist()
    at = 0
    for g, rows in enumerate(counts.tolist()):
        path = range(begins[g], begins[g + 1])
        width = sum(many[k] for k in path)
        block = out[at : at + rows * width].reshape(rows, width)
        column = 0
        for k in path:
            taken = order[cursor[lengths[k]] : cursor[lengths[k]] + rows * many[k]]
            block[:, column : column + many[k]] = taken.reshape(rows, many[k])
            cursor[lengths[k]] += rows * many[k]
            column += many[k]
        block.sort(axis=1)
        at += rows * width


def any_trained(labels: np.ndarray, begins: np.ndarray, ends: np.ndarray, out: np.ndarray) -> None:
    """See `packing.any_trained`. Reads all labels, about CHUNK_TOKENS at a time."""
    at = 0
    while at < len(ends):
        stop = max(at + 1, int(np.searchsorted(ends, begins[at] + CHUNK_TOKENS, side="right")))
        low, high = int(begins[at]), int(ends[at:stop].max())
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(labels[low:high] >= 0)])
        out[at:stop] = sums[ends[at:stop] - low] > sums[begins[at:stop] - low]
        at = stop
