"""Where the documents of a micro-batch begin: found on the host, where nobody waits for it."""

from __future__ import annotations

import numpy as np


def document_bounds(doc_ids: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """doc_ids `[gas, b, s]` -> where each document of a micro-batch starts among its b·s tokens, and then b·s again and
    again: int32 `[gas, n]`; and the length of the longest document of each micro-batch.

    n is one of few numbers, at most a quarter above what is needed, so that memory and compiled code of one step serve
    the next. Documents of no length at the end cost an attention kernel next to nothing.
    """
    starts = np.ones(doc_ids.shape, bool)
    starts[..., 1:] = doc_ids[..., 1:] != doc_ids[..., :-1]
    found = [np.flatnonzero(micro) for micro in starts]
    end = doc_ids[0].size
    bounds = np.full((len(doc_ids), _few_sizes(max(map(len, found)) + 1)), end, np.int32)
    for row, begins in zip(bounds, found, strict=True):
        row[: len(begins)] = begins
    return bounds, tuple(np.diff(bounds).max(axis=1).tolist())


def _few_sizes(size: int) -> int:
    """`size` or more, by at most a quarter above 16: 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ..."""
    step = 1 << max(2, (size - 1).bit_length() - 3)
    return max(16, -(-size // step) * step)
