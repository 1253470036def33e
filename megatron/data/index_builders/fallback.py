"""The index builders in numpy: the same arrays as the native ones, for machines without a C++ compiler."""

from __future__ import annotations

import numpy as np

CHUNK = 1 << 16  # documents per piece: keeps the temporaries far below the arrays that are built
LANE, LANES = 1 << 10, 1 << 10  # blending: positions in a row, and how many such rows advance together


def sample_index(sizes: np.ndarray, doc_idx: np.ndarray, seq_length: int, out: np.ndarray) -> None:
    """Fill `out` `[samples + 1, 2]` with the (position in `doc_idx`, offset) at which each sample starts.

    Sample k starts at token `k * seq_length` of the stream that the documents form in the order of `doc_idx`; the
    first document that ends beyond that token holds it. Row 0 is (0, 0) also when the first documents are empty.
    """
    out[0] = 0
    row, start = 1, 0  # next row to fill; tokens before this piece
    for first in range(0, len(doc_idx), CHUNK):
        if row == len(out):
            return
        lengths = sizes[doc_idx[first : first + CHUNK]]
        ends = np.cumsum(lengths, dtype=np.int64)
        # Rows whose token is in this piece: k * seq_length < start + ends[-1].
        stop = min(len(out), -(-(start + int(ends[-1])) // seq_length))
        if stop > row:
            wanted = np.arange(row, stop, dtype=np.int64) * seq_length - start
            position = np.searchsorted(ends, wanted, side="right")
            out[row:stop, 0] = position + first
            out[row:stop, 1] = wanted - ends[position] + lengths[position]
            row = stop
        start += int(ends[-1])
    if row < len(out):
        raise ValueError("the documents hold too few tokens for the samples asked for")


def blend(weights: np.ndarray, source: np.ndarray, sample: np.ndarray) -> None:
    """Fill `source` and `sample` `[samples]`: position i goes to the source with the largest
    `weights[d] * max(i, 1) - taken[d]`, the first of equals, and takes that source's next sample.

    Each choice depends on all before it. So that numpy has many to make at once, the positions are cut into lanes that
    advance together, each from a guess of what was taken before it. Where the guess was wrong, which the end of the
    lane before shows, the lane is done again from that end. What is wrong soon cancels out, so two rounds are usual.
    """
    taken = np.zeros(len(weights))
    for first in range(0, len(source), LANES * LANE):
        part = slice(first, first + LANES * LANE)
        taken = _blend_part(weights, first, taken, source[part], sample[part])


def _blend_part(
    weights: np.ndarray, first: int, taken: np.ndarray, source: np.ndarray, sample: np.ndarray
) -> np.ndarray:
    """Fill what follows position `first`, before which `taken` `[sources]` were taken; returns those after it."""
    starts = first + LANE * np.arange(-(-len(source) // LANE), dtype=np.int64)
    before = _about_taken(weights, starts)
    before[:, 0] = taken
    after = np.empty_like(before)
    chosen = np.empty((len(starts), LANE), dtype=source.dtype)
    counts = np.empty((len(starts), LANE), dtype=sample.dtype)
    wrong = np.arange(len(starts))
    while len(wrong):
        chosen[wrong], counts[wrong], after[:, wrong] = _walk(weights, starts[wrong], before[:, wrong], source.dtype)
        wrong = 1 + np.flatnonzero((before[:, 1:] != after[:, :-1]).any(axis=0))
        before[:, wrong] = after[:, wrong - 1]
    left = len(source)
    source[:], sample[:] = chosen.reshape(-1)[:left], counts.reshape(-1)[:left]
    return after[:, -1]


def _about_taken(weights: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """What is owed before each position, in whole numbers that add up: `[sources, positions]`."""
    owed = (weights / weights.sum())[:, None] * positions
    taken = np.floor(owed)
    rank = np.argsort(np.argsort(taken - owed, axis=0, kind="stable"), axis=0)
    return taken + (rank < positions - taken.sum(axis=0))


def _walk(
    weights: np.ndarray, starts: np.ndarray, taken: np.ndarray, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`LANE` choices in each lane, from `taken` `[sources, lanes]`: sources, counts (`[lanes, LANE]`), `taken` then."""
    taken, lanes = taken.copy(), np.arange(len(starts))
    chosen = np.empty((LANE, len(starts)), dtype=dtype)
    counts = np.empty((LANE, len(starts)), dtype=np.int64)
    owed = np.empty_like(taken)
    for step in range(LANE):
        np.multiply(weights[:, None], np.maximum(starts + step, 1), out=owed)
        owed -= taken
        chosen[step] = best = owed.argmax(axis=0)  # the first of equals
        counts[step] = count = taken[best, lanes]
        taken[best, lanes] = count + 1
    return chosen.T, counts.T, taken
