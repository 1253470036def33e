"""Which documents a packing of whole documents can use, and how many tokens of each.

A document is left out when it trains nothing: it has fewer than two tokens (the first is never a target), or its labels
are all -100 where targets are read. GPT-NeoX looks one label too far to the left, and loses documents whose only
trained label is that of the last target.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from megatron.data.index_builders.packing import any_trained
from megatron.data.tokens.cache import Arrays, IndexCache, content_key
from megatron.data.tokens.indexed import IndexedDataset

SCAN_VERSION = 1
CHUNK_PIECES = 1 << 20


@dataclass(frozen=True)
class Pieces:
    """Parts of documents, each at most as long as a sample.

    Piece p is all of item `first + p`, or its first part. After those of all documents follow the later parts of long
    ones, in the order of the documents.

    Attributes:
        lengths: int32 `[documents + later]`, tokens of each piece; 0 for one that is not used.
        first: number of the first item.
        later_documents: `[later]`, the items of the later parts.
        later_offsets: `[later]`, where in them they begin.
    """

    lengths: np.ndarray
    first: int
    later_documents: np.ndarray
    later_offsets: np.ndarray

    @property
    def documents(self) -> int:
        return len(self.lengths) - len(self.later_documents)


@dataclass(frozen=True)
class LeftOut:
    """Counts for the log: documents too long, documents or pieces that train nothing, documents cut, tokens so lost."""

    too_long: int = 0
    silent: int = 0
    cut: int = 0
    cut_tokens: int = 0

    def add(self, other: LeftOut) -> LeftOut:
        """The counts of both."""
        return LeftOut(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def whole_pieces(sizes: np.ndarray, first: int, capacity: int, allow_chopped: bool) -> tuple[Pieces, LeftOut]:
    """One piece per document: longer ones lose their end (`allow_chopped`) or are not used."""
    long = sizes > capacity
    count, none = int(np.count_nonzero(long)), np.empty(0, np.int64)
    pieces = Pieces(np.minimum(sizes, np.int32(capacity)).astype(np.int32, copy=False), first, none, none)
    if count == 0:
        return pieces, LeftOut()
    if allow_chopped:
        return pieces, LeftOut(cut=count, cut_tokens=int((sizes[long] - capacity).sum(dtype=np.int64)))
    pieces.lengths[long] = 0
    return pieces, LeftOut(too_long=count)


def fragment_pieces(sizes: np.ndarray, first: int, capacity: int) -> tuple[Pieces, LeftOut]:
    """Documents longer than `capacity` become several pieces that share one token, like the samples of a stream.

    The shared token is the last target of one piece and the first input of the next, so every token but the first is
    a target once.
    """
    long = np.flatnonzero(sizes > capacity)
    totals, step = sizes[long].astype(np.int64), capacity - 1
    later = -(-(totals - 1) // step) - 1
    number = np.arange(int(later.sum())) - np.repeat(np.cumsum(later) - later, later)
    offsets = (number + 1) * step
    rest = np.minimum(np.repeat(totals, later) - offsets, capacity).astype(np.int32)
    lengths = np.concatenate([np.minimum(sizes, np.int32(capacity)), rest], dtype=np.int32)
    return Pieces(lengths, first, np.repeat(long + first, later), offsets), LeftOut(cut=len(long))


def drop_silent(pieces: Pieces, labels: IndexedDataset | None, cache: IndexCache, name: str) -> Pieces:
    """The pieces, with those that train nothing set to length 0.

    Reads all labels once; the result is kept in `cache` until the label file is written again.
    """
    silent = pieces.lengths == 1
    if labels is not None:
        silent |= ~_find_trained(pieces, labels, cache, name)
    pieces.lengths[silent] = 0
    return pieces


def _find_trained(pieces: Pieces, labels: IndexedDataset, cache: IndexCache, name: str) -> np.ndarray:
    # Sizes and times of the files represent their content; the packing's own key depends on what was found in them.
    stats = [
        (path if (path := Path(f"{part.prefix}.bin")).exists() else Path(part.prefix)).stat() for part in labels.parts
    ]
    written = {"version": SCAN_VERSION, "labels": [[s.st_size, s.st_mtime_ns] for s in stats], "first": pieces.first}
    key = content_key({"kind": "trained", **written}, pieces.lengths, pieces.later_documents, pieces.later_offsets)

    def build() -> Arrays:
        return {"trains": np.packbits(scan_labels(pieces, labels))}

    return np.unpackbits(cache.arrays(f"{name}-trained", key, build)["trains"], count=len(pieces.lengths)).view(bool)


def scan_labels(pieces: Pieces, labels: IndexedDataset) -> np.ndarray:
    """bool `[pieces]`: whether a target of the piece, any of its tokens but the first, has a label."""
    found, count = np.zeros(len(pieces.lengths), dtype=bool), pieces.documents
    base = 0  # number of the part's first item
    for part in labels.parts:
        bounds = np.asarray([base, base + len(part)])
        first, end = np.clip(bounds - pieces.first, 0, count).tolist()
        for a in range(first, end, CHUNK_PIECES):
            b = min(a + CHUNK_PIECES, end)
            items = np.arange(a, b) + (pieces.first - base)
            found[a:b] = _any_label(part, items, np.zeros(b - a, np.int64), pieces.lengths[a:b])
        first, end = np.searchsorted(pieces.later_documents, bounds).tolist()
        for a in range(first, end, CHUNK_PIECES):
            b = min(a + CHUNK_PIECES, end)
            items, offsets = pieces.later_documents[a:b] - base, pieces.later_offsets[a:b]
            here = slice(count + a, count + b)
            found[here] = _any_label(part, items, offsets, pieces.lengths[here])
        base += len(part)
    return found


def _any_label(labels: IndexedDataset, items: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """bool: for each piece whether any token but its first has a label."""
    if type(labels) is not IndexedDataset:  # labels made when they are read: one piece after the other
        found = np.zeros(len(items), dtype=bool)
        for i, piece in enumerate(zip(items.tolist(), offsets.tolist(), lengths.tolist(), strict=True)):
            found[i] = bool(np.any(labels.get(*piece)[1:] >= 0))
        return found
    begins = labels.pointers[items] // labels.dtype.itemsize + offsets
    ends = begins + lengths
    begins = np.minimum(begins + 1, ends)
    return any_trained(labels.tokens, begins, ends)
