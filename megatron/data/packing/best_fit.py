"""`pack_impl: best_fit`: whole documents, put together so that hardly any padding is left (best fit decreasing).

Each pass over the documents is packed as a whole and is a stretch of the sample order of its own: every document comes
once in it. Which documents of a length go where, and the order of the samples, are shuffled again in each pass; within
a sample documents are in the order of the file.

Documents longer than a sample are cut into pieces of seq_length + 1 tokens that share one token, as the samples of a
stream do, so that nothing of them is lost (`allow_chopped: true`), or left out (`false`). A later piece is read as a
document of its own: its positions begin at 0.

The packing is decided on the histogram of lengths, without looking at single documents. Best fit decreasing takes
pieces from the longest to the shortest and puts each into the row with the least room left that still holds it, or into
a new row. Rows with equal room are interchangeable, and so are pieces of equal length, so whole groups of rows that
were filled alike are filled together. The work depends on how many different lengths there are and not on how many
documents, and every epoch has the same number of rows whichever documents meet in one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from megatron.data.index_builders import INT32_MAX
from megatron.data.index_builders.packing import Patterns, by_length, fill_patterns, length_starts
from megatron.data.index_builders.shuffle import shuffle
from megatron.data.packing import PACKINGS, Segment
from megatron.data.packing.samples import PackedSamples, in_range
from megatron.data.packing.usable import LeftOut, Pieces, fragment_pieces
from megatron.data.packing.whole_documents import WholeDocuments
from megatron.data.tokens.cache import Arrays


class BestFitSamples(PackedSamples):
    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        row_starts = self.arrays["sample_idx"]
        epoch = index // (len(row_starts) - 1)
        row = int(self.arrays["shuffle_idx"][index])
        start, end = (row_starts[row : row + 2] + epoch * int(row_starts[-1])).tolist()
        found = self.arrays["doc_idx"][start:end]
        # Numbers beyond the data are later parts of long documents.
        wholes = int(np.searchsorted(found, len(self.data)))
        later = found[wholes:] - len(self.data)
        documents, offsets = self.arrays["later_documents"][later], self.arrays["later_offsets"][later]
        lengths = np.minimum(self.data.sizes[documents] - offsets, self.capacity)
        parts = zip(documents.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
        return [*self._whole(found[:wholes]), *parts]

    def find(self, items: range) -> np.ndarray:
        doc_idx, row_starts, shuffle_idx = (self.arrays[name] for name in ("doc_idx", "sample_idx", "shuffle_idx"))
        held = in_range(doc_idx, items)
        later = np.flatnonzero(in_range(self.arrays["later_documents"], items))
        if len(later):  # parts of an item follow one another
            held |= in_range(doc_idx, range(len(self.data) + int(later[0]), len(self.data) + int(later[-1]) + 1))
        rows = len(row_starts) - 1
        epoch, place = np.divmod(np.flatnonzero(held), int(row_starts[-1]))
        by_epoch = np.zeros((len(shuffle_idx) // rows, rows), dtype=bool)
        by_epoch[epoch, np.searchsorted(row_starts, place, side="right") - 1] = True
        return np.flatnonzero(np.take_along_axis(by_epoch, shuffle_idx.reshape(-1, rows).astype(np.int64), axis=1))


@PACKINGS.register("best_fit", answers="joined")
class BestFit(WholeDocuments):
    """Whole documents, put together so that hardly any padding is left."""

    kind, entry, samples_type = "best_fit", "best-fit", BestFitSamples

    @property
    def _fragments(self) -> bool:
        """Whether the rest of a long document is read too, in pieces of its own: not of an answer, which is one."""
        return self.allow_chopped and not self.compares

    def _cut(self, sizes: np.ndarray, first: int) -> tuple[Pieces, LeftOut]:
        if not self._fragments:
            return super()._cut(sizes, first)
        return fragment_pieces(sizes[0], first, self.capacity)

    @cached_property
    def patterns(self) -> Patterns:
        """The rows of every epoch, by the lengths in them."""
        return best_fit_patterns(self.histogram, self.capacity)

    def samples_per_epoch(self, epochs: int = 1) -> int:
        return epochs * self.patterns.rows

    @property
    def counted(self) -> str:
        return "documents or pieces of one" if self._fragments else super().counted

    def _cut_note(self) -> str:
        if not self._fragments:
            return super()._cut_note()
        return f"{self.left_out.cut} documents of more than {self.limit} are read in several pieces"

    def segment(self, samples: int, seed: int) -> Segment:
        rows = self.patterns.rows
        epochs = -(-samples // rows)
        return Segment(epochs, epochs * rows, seed)

    def build_index(self, segments: Sequence[Segment]) -> Arrays:
        return best_fit_index(self.pieces, len(self.data), self.histogram, self.patterns, segments)


def best_fit_index(
    pieces: Pieces, items: int, histogram: np.ndarray, patterns: Patterns, segments: Sequence[Segment]
) -> Arrays:
    """The arrays of some segments of a dataset of `items` items.

    Returns `doc_idx` int32 (int64 beyond 2^31) `[epochs * pieces]`, epoch after epoch and row after row: an item, or
    `items + k` for later part k of a long one; `later_documents` and `later_offsets`, which item that is part of and
    where it begins; `sample_idx` int64 `[rows + 1]`, where the rows of an epoch begin among its pieces, the same in
    each; `shuffle_idx` uint32 or int64 `[epochs * rows]`, the row to read in its epoch.
    """
    starts = length_starts(histogram)
    small = items + len(pieces.later_documents) <= INT32_MAX
    by_size = by_length(pieces.lengths, starts, np.int32 if small else np.int64)
    by_size += pieces.first
    # Numbers after the documents of the range are later parts.
    by_size[by_size >= pieces.first + pieces.documents] += items - pieces.documents - pieces.first
    row_starts, rows = patterns.row_starts(), patterns.rows
    epochs, count = sum(segment.epochs for segment in segments), len(by_size)
    doc_idx = np.empty(epochs * count, dtype=by_size.dtype)
    shuffle_idx = np.empty(epochs * rows, dtype=np.uint32 if rows < 2**32 else np.int64)
    borders = np.unique(starts).tolist()
    drawn = [(segment.seed, number) for segment in segments for number in range(segment.epochs)]
    for epoch, seed in enumerate(drawn):
        rng = np.random.RandomState(seed)
        for a, b in pairwise(borders):
            shuffle(rng, by_size[a:b])
        fill_patterns(by_size, starts, patterns, doc_idx[epoch * count : (epoch + 1) * count])
        permutation = shuffle_idx[epoch * rows : (epoch + 1) * rows]
        permutation[:] = np.arange(rows)
        shuffle(rng, permutation)
    return {
        "doc_idx": doc_idx,
        "sample_idx": row_starts,
        "shuffle_idx": shuffle_idx,
        "later_documents": pieces.later_documents,
        "later_offsets": pieces.later_offsets,
    }


def best_fit_patterns(histogram: np.ndarray, capacity: int) -> Patterns:
    """Best fit decreasing of `histogram[n]` pieces of n tokens (n from 1 to `capacity`) into rows of `capacity`."""
    groups = _Groups(capacity)
    for size in np.flatnonzero(histogram)[::-1].tolist():
        if size > 0:
            groups.place(size, int(histogram[size]))
    return groups.patterns()


class _Groups:
    """Groups of rows filled alike: group g holds what its parent holds and `copies[g]` pieces of `sizes[g]` more."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.parents: list[int] = []
        self.sizes: list[int] = []
        self.copies: list[int] = []
        self.counts: list[int] = []
        self.by_room: dict[int, list[int]] = {}  # room left in a row -> groups
        self.rooms: list[int] = []  # the keys of by_room, ascending

    def place(self, size: int, pieces: int) -> None:
        """Put `pieces` pieces of `size` tokens into the rows."""
        while pieces:
            at = bisect_left(self.rooms, size)
            if at == len(self.rooms):
                self._open(size, pieces)
                return
            room = self.rooms[at]
            stack = self.by_room[room]
            group = stack[-1]
            # The tightest row stays the tightest while it is filled, so it takes what it can before the next.
            many = min(room // size, pieces)
            rows = min(self.counts[group], pieces // many)
            self.counts[group] -= rows
            if self.counts[group] == 0:
                stack.pop()
                if not stack:
                    del self.by_room[room]
                    del self.rooms[at]
            self._add(group, size, many, rows, room - many * size)
            pieces -= many * rows

    def _open(self, size: int, pieces: int) -> None:
        many = self.capacity // size
        rows, rest = divmod(pieces, many)
        if rows:
            self._add(-1, size, many, rows, self.capacity - many * size)
        if rest:
            self._add(-1, size, rest, 1, self.capacity - rest * size)

    def _add(self, parent: int, size: int, copies: int, rows: int, room: int) -> None:
        self.parents.append(parent)
        self.sizes.append(size)
        self.copies.append(copies)
        self.counts.append(rows)
        if room == 0:
            return
        if room not in self.by_room:
            self.by_room[room] = []
            insort(self.rooms, room)
        self.by_room[room].append(len(self.parents) - 1)

    def patterns(self) -> Patterns:
        counts: list[int] = []
        paths: list[int] = [0]
        nodes: list[int] = []
        for group, rows in enumerate(self.counts):
            if rows == 0:
                continue
            path = []
            while group >= 0:
                path.append(group)
                group = self.parents[group]
            nodes.extend(reversed(path))
            counts.append(rows)
            paths.append(len(nodes))
        return Patterns(
            np.asarray(counts, dtype=np.int64),
            np.asarray(paths, dtype=np.int64),
            np.asarray([self.sizes[node] for node in nodes], dtype=np.int32),
            np.asarray([self.copies[node] for node in nodes], dtype=np.int32),
        )
