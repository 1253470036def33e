"""Parts of a token file by how many tokens they hold: whole documents from its beginning or its end."""

from __future__ import annotations

import numpy as np

Range = tuple[int, int]
"""Half-open range of documents."""


def count_tokens(sizes: np.ndarray, documents: Range) -> int:
    """Tokens in a range of documents; `sizes` are those of all."""
    first, end = documents
    return int(sizes[first:end].sum(dtype=np.int64))


def head(sizes: np.ndarray, documents: Range, tokens: float) -> Range:
    """The first documents of a range with at most `tokens` tokens together, but at least one document."""
    first, end = documents
    whole = int(np.searchsorted(np.cumsum(sizes[first:end], dtype=np.int64), tokens, side="right"))
    return first, min(end, first + max(1, whole))


def tail(sizes: np.ndarray, documents: Range, tokens: int) -> Range:
    """The fewest last documents of a range with at least `tokens` tokens together; all of them when that is too few."""
    first, end = documents
    backwards = np.cumsum(sizes[first:end][::-1], dtype=np.int64)
    return max(first, end - int(np.searchsorted(backwards, tokens, side="left")) - 1), end
