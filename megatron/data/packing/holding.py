"""The way back from a document to the samples that it is in, without looking at all samples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Wanted = Mapping[str, range]
"""Items that are looked for, by the prefix of their token file."""

NONE = np.empty(0, dtype=np.int64)


def are_in(numbers: np.ndarray, items: range) -> np.ndarray:
    """bool, of the shape of `numbers`: which of them are in a range of step 1."""
    return (numbers >= items.start) & (numbers < items.stop)


def rows_touching(begins: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Which rows reach over one of some places; those that begin just behind one are taken for such, too.

    Args:
        begins: `[rows + 1]`, the place where each row begins, ascending, and the last one's end.
        hits: the places, ascending.

    Returns bool `[rows + 1]`; the last is of no row.
    """
    first = np.maximum(np.searchsorted(begins, hits, side="left") - 1, 0)
    last = np.searchsorted(begins, hits, side="right") - 1
    changes = np.zeros(len(begins) + 1, dtype=np.int64)
    np.add.at(changes, first, 1)
    np.add.at(changes, last + 1, -1)
    return np.cumsum(changes)[:-1] > 0
