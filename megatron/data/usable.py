"""Which documents a packing of whole documents can use, and how many tokens of each.

A document is left out when it trains nothing: it has fewer than two tokens (the first is never a target), or its labels
are all -100 where targets are read. GPT-NeoX looks one label too far to the left, and loses documents whose only
trained label is that of the last target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.cache import Arrays, IndexCache, content_key
from megatron.data.indexed import IndexedDataset

SCAN_VERSION = 1
CHUNK_TOKENS = 1 << 22  # labels read at a time
CHUNK_PIECES = 1 << 20


@dataclass(frozen=True)
class Pieces:
    """Parts of documents, each at most as long as a sample.

    Attributes:
        documents: item numbers `[pieces]`; None: piece p is all, or the first part, of item `first + p`.
        offsets: int32 `[pieces]`, where each begins in its document; None: all at 0.
        lengths: int32 `[pieces]`; 0 for a piece that is not used.
        first: see `documents`.
    """

    lengths: np.ndarray
    first: int = 0
    documents: np.ndarray | None = None
    offsets: np.ndarray | None = None


@dataclass(frozen=True)
class LeftOut:
    """Counts for the log: documents too long, documents or pieces that train nothing, documents cut, tokens lost so."""

    too_long: int = 0
    silent: int = 0
    cut: int = 0
    cut_tokens: int = 0


def whole_pieces(sizes: np.ndarray, first: int, capacity: int, allow_chopped: bool) -> tuple[Pieces, LeftOut]:
    """One piece per document: longer ones lose their end (`allow_chopped`) or are not used."""
    long = sizes > capacity
    count = int(np.count_nonzero(long))
    lengths = np.minimum(sizes, np.int32(capacity)).astype(np.int32, copy=False)
    if count == 0:
        return Pieces(lengths, first), LeftOut()
    if allow_chopped:
        return Pieces(lengths, first), LeftOut(cut=count, cut_tokens=int((sizes[long] - capacity).sum(dtype=np.int64)))
    lengths[long] = 0
    return Pieces(lengths, first), LeftOut(too_long=count)


def fragment_pieces(sizes: np.ndarray, first: int, capacity: int) -> tuple[Pieces, LeftOut]:
    """Documents longer than `capacity` become several pieces that share one token, like the samples of a stream.

    The shared token is the last target of one piece and the first input of the next, so every token but the first is
    a target once.
    """
    if not np.any(sizes > capacity):
        return whole_pieces(sizes, first, capacity, True)
    step = capacity - 1
    parts = np.maximum(1, -(-(sizes.astype(np.int64) - 1) // step))
    number = np.repeat(np.arange(len(sizes), dtype=np.int64), parts)
    offsets = (np.arange(len(number)) - np.repeat(np.cumsum(parts) - parts, parts)) * step
    lengths = np.minimum(sizes[number] - offsets, capacity)
    documents = number + first
    if first + len(sizes) <= np.iinfo(np.int32).max:
        documents = documents.astype(np.int32)
    pieces = Pieces(lengths.astype(np.int32), first, documents, offsets.astype(np.int32))
    return pieces, LeftOut(cut=int(np.count_nonzero(sizes > capacity)))


def without_silent(pieces: Pieces, labels: IndexedDataset | None, cache: IndexCache, name: str) -> tuple[Pieces, int]:
    """The pieces with those that train nothing set to length 0, and how many those are.

    Reads all labels once; what was found is kept in `cache` as long as the label file is not written again.
    """
    lengths = pieces.lengths
    trains = lengths > 1
    if labels is not None:
        trains = trains & _trains(pieces, labels, cache, name)
    silent = int(np.count_nonzero(lengths)) - int(np.count_nonzero(trains))
    if silent:
        lengths = np.where(trains, lengths, np.int32(0))
    return Pieces(lengths, pieces.first, pieces.documents, pieces.offsets), silent


def _trains(pieces: Pieces, labels: IndexedDataset, cache: IndexCache, name: str) -> np.ndarray:
    # The files' sizes and times stand for their content here; the packing's own key holds what was found in them.
    stats = [
        (path if (path := Path(f"{part.prefix}.bin")).exists() else Path(part.prefix)).stat() for part in labels.parts
    ]
    written = {"version": SCAN_VERSION, "labels": [[s.st_size, s.st_mtime_ns] for s in stats], "first": pieces.first}
    described = [a for a in (pieces.documents, pieces.offsets) if a is not None]
    key = content_key({"kind": "trained", **written}, pieces.lengths, *described)

    def build() -> Arrays:
        return {"trains": np.packbits(scan_labels(pieces, labels))}

    return np.unpackbits(cache.arrays(f"{name}-trained", key, build)["trains"], count=len(pieces.lengths)).view(bool)


def scan_labels(pieces: Pieces, labels: IndexedDataset) -> np.ndarray:
    """bool `[pieces]`: whether a target of the piece, any of its tokens but the first, has a label."""
    found = np.zeros(len(pieces.lengths), dtype=bool)
    base = 0  # number of the part's first item
    for part in labels.parts:
        bounds = (base, base + len(part))
        if pieces.documents is None:
            first, end = np.clip(np.asarray(bounds) - pieces.first, 0, len(found)).tolist()
        else:
            first, end = np.searchsorted(pieces.documents, bounds).tolist()
        for a in range(first, end, CHUNK_PIECES):
            b = min(a + CHUNK_PIECES, end)
            items = np.arange(a, b) + pieces.first if pieces.documents is None else pieces.documents[a:b]
            offsets = np.zeros(b - a, np.int64) if pieces.offsets is None else pieces.offsets[a:b]
            found[a:b] = _any_label(part, items - base, offsets, pieces.lengths[a:b])
        base += len(part)
    return found


def _any_label(labels: IndexedDataset, items: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """bool: for each piece whether any token but its first has a label. Reads about CHUNK_TOKENS at a time."""
    found = np.zeros(len(items), dtype=bool)
    if type(labels) is not IndexedDataset:  # no file of labels lies behind it: ask for one piece after the other
        for i, piece in enumerate(zip(items.tolist(), offsets.tolist(), lengths.tolist(), strict=True)):
            found[i] = bool(np.any(labels.get(*piece)[1:] >= 0))
        return found
    begins = labels.pointers[items] // labels.dtype.itemsize + offsets
    ends = begins + lengths
    begins = np.minimum(begins + 1, ends)
    tokens, at = labels.tokens, 0
    while at < len(ends):
        stop = max(at + 1, int(np.searchsorted(ends, begins[at] + CHUNK_TOKENS, side="right")))
        low, high = int(begins[at]), int(ends[at:stop].max())
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens[low:high] >= 0)])
        found[at:stop] = sums[ends[at:stop] - low] > sums[begins[at:stop] - low]
        at = stop
    return found
