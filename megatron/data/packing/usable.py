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
        sides: the tokens that each text of a piece keeps, like `lengths`: one array, or those of chosen and rejected.
        first: number of the first item.
        later_documents: `[later]`, the items of the later parts.
        later_offsets: `[later]`, where in them they begin.
    """

    lengths: np.ndarray
    sides: tuple[np.ndarray, ...]
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


def kept_tokens(sizes: np.ndarray, capacity: int, rows: int = 1) -> np.ndarray:
    """How many tokens of each text are kept where longer ones lose their end: int32 `[sides, documents]`.

    Of a pair that shares one row both texts are cut to the same length, the largest with which they fit.

    Args:
        sizes: `[sides, documents]`, tokens of each text.
        capacity: tokens of a row.
        rows: that a document has; 1, or one for each side.
    """
    most = np.full(sizes.shape[1], capacity, np.int32)
    if rows < len(sizes):
        over = sizes.sum(axis=0) > capacity
        most[over] = np.maximum(capacity - sizes.min(axis=0), capacity // 2)[over]
    return np.minimum(sizes, most).astype(np.int32, copy=False)


def whole_pieces(
    sizes: np.ndarray, first: int, capacity: int, allow_chopped: bool, rows: int = 1
) -> tuple[Pieces, LeftOut]:
    """One piece per document: longer ones lose their end (`allow_chopped`) or are not used.

    `sizes` and `rows`: see `kept_tokens`. A pair of which one text is too short to train has a length of 1.
    """
    kept, none = kept_tokens(sizes, capacity, rows), np.empty(0, np.int64)
    long = (kept < sizes).any(axis=0)
    lengths = kept[0] if len(kept) == 1 else kept.sum(axis=0, dtype=np.int32)
    if len(kept) > 1:
        lengths[(kept < 2).any(axis=0)] = 1
    pieces, count = Pieces(lengths, tuple(kept), first, none, none), int(np.count_nonzero(long))
    if count == 0:
        return pieces, LeftOut()
    if allow_chopped:
        return pieces, LeftOut(cut=count, cut_tokens=int((sizes - kept).sum(dtype=np.int64)))
    kept[:, long] = lengths[long] = 0
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
    return Pieces(lengths, (lengths,), first, np.repeat(long + first, later), offsets), LeftOut(cut=len(long))


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
    key = content_key({"kind": "trained", **written}, *pieces.sides, pieces.later_documents, pieces.later_offsets)

    def build() -> Arrays:
        found = [scan_labels(pieces, kept, side) for kept, side in zip(pieces.sides, labels.sides, strict=True)]
        return {"trains": np.packbits(np.logical_and.reduce(found))}

    return np.unpackbits(cache.arrays(f"{name}-trained", key, build)["trains"], count=len(pieces.lengths)).view(bool)


def scan_labels(pieces: Pieces, lengths: np.ndarray, labels: IndexedDataset) -> np.ndarray:
    """bool `[pieces]`: whether a target of the piece, any of its tokens but the first, has a label.

    `lengths`: tokens of each, which may be those of one text of a pair.
    """
    found, count = np.zeros(len(lengths), dtype=bool), pieces.documents
    base = 0  # number of the part's first item
    for part in labels.parts:
        bounds = np.asarray([base, base + len(part)])
        first, end = np.clip(bounds - pieces.first, 0, count).tolist()
        for a in range(first, end, CHUNK_PIECES):
            b = min(a + CHUNK_PIECES, end)
            items = np.arange(a, b) + (pieces.first - base)
            found[a:b] = _any_label(part, items, np.zeros(b - a, np.int64), lengths[a:b])
        first, end = np.searchsorted(pieces.later_documents, bounds).tolist()
        for a in range(first, end, CHUNK_PIECES):
            b = min(a + CHUNK_PIECES, end)
            items, offsets = pieces.later_documents[a:b] - base, pieces.later_offsets[a:b]
            here = slice(count + a, count + b)
            found[here] = _any_label(part, items, offsets, lengths[here])
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
