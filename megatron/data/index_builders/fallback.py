"""The index builders in numpy: the same arrays as the native ones, for machines without a C++ compiler."""

from __future__ import annotations

import numpy as np

CHUNK = 1 << 16  # documents per piece: keeps the temporaries far below the arrays that are built


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
        # Rows whose token lies in this piece: k * seq_length < start + ends[-1].
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

    Each choice depends on all before it, so this is a plain loop (about 1e6 positions a second).
    """
    shares = [float(weight) for weight in weights]
    taken = [0.0] * len(shares)
    sources = range(len(shares))
    chunk = 1 << 16
    for first in range(0, len(source), chunk):
        length = min(chunk, len(source) - first)
        chosen, counts = [0] * length, [0.0] * length
        for i in range(length):
            scale = float(first + i or 1)
            best, most = 0, shares[0] * scale - taken[0]
            for d in sources:
                owed = shares[d] * scale - taken[d]
                if owed > most:
                    best, most = d, owed
            chosen[i], counts[i] = best, taken[best]
            taken[best] += 1.0
        source[first : first + length] = chosen
        sample[first : first + length] = counts
