"""What the tests of packings share: small corpora with and without labels, and which of their documents are usable."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from megatron.data.packing import PACKINGS, Packing
from megatron.data.tokens.indexed import IndexedDataset
from tests.data.corpus import write

WHOLE = ["pack_until_overflow", "unpacked", "best_fit"]
ALL = ["packed", *WHOLE]

SIZES = st.lists(st.integers(0, 14), min_size=1, max_size=12)


@contextmanager
def corpus(sizes: list[int], masks: list[list[bool]] | None = None) -> Iterator[tuple[IndexedDataset, Any]]:
    """Documents whose tokens count through from 1 over all of them, and labels where `masks` is true."""
    with tempfile.TemporaryDirectory() as folder:
        ends = np.cumsum([1, *sizes]).tolist()
        documents = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
        data = IndexedDataset(write(Path(folder) / "x", documents, np.int32))
        labels = None
        if masks is not None:
            kept = [[t if m else -100 for t, m in zip(*pair)] for pair in zip(documents, masks, strict=True)]
            labels = IndexedDataset(write(Path(folder) / "l", kept, np.int32))
        yield data, labels


def packing(name: str, data: IndexedDataset, seq: int, **options: Any) -> Packing:
    return PACKINGS[name](data, seq_length=seq, **options)


def pieces_of(dataset: Any, index: int) -> list[tuple[int, int, int]]:
    return [(piece.document, piece.offset, piece.length) for piece in dataset.locate(index).pieces]


def trains(size: int, mask: list[bool] | None, seq: int) -> bool:
    return size > 1 if mask is None else any(mask[1 : seq + 1])


def usable(sizes: list[int], masks: list[list[bool]] | None, seq: int, chop: bool) -> list[int]:
    return [d for d, size in enumerate(sizes) if trains(size, masks and masks[d], seq) and (chop or size <= seq + 1)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[list[bool]] | None]:
    sizes = draw(SIZES)
    if draw(st.booleans()):
        return sizes, None
    return sizes, [draw(st.lists(st.booleans(), min_size=size, max_size=size)) for size in sizes]
