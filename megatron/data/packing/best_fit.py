"""`pack_impl: best_fit`: whole documents, put together so that hardly any padding is left (best fit decreasing).

Each pass over the documents is packed as a whole, on the histogram of their lengths (best_fit_plan.py), and is a
stretch of the sample order of its own: every document comes once in it. Which documents of a length go where, and the
order of the samples, are shuffled anew in each pass; within a sample documents are in the order of the file.

Documents longer than a sample are cut into pieces of seq_length + 1 tokens that share one token, as the samples of a
stream do, so that nothing of them is lost (`allow_chopped: true`), or left out (`false`). A later piece is read as a
document of its own: its positions begin at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from megatron.data.index_builders import INT32_MAX
from megatron.data.index_builders.packing import by_length, fill_patterns, length_starts
from megatron.data.index_builders.shuffle import shuffle
from megatron.data.packing.best_fit_plan import Patterns, best_fit_patterns
from megatron.data.packing.contract import Segment
from megatron.data.packing.holding import are_in
from megatron.data.packing.rows import Rows, WholeDocuments
from megatron.data.packing.usable import LeftOut, Pieces, fragment_pieces
from megatron.data.tokens.cache import Arrays, IndexCache


class BestFit(WholeDocuments):
    """`pack_impl: best_fit` for the documents of one source."""

    kind = "best_fit"
    counted = "documents or pieces of one"

    def _cut(self, sizes: np.ndarray, first: int) -> tuple[Pieces, LeftOut]:
        if not self.allow_chopped:
            return super()._cut(sizes, first)
        return fragment_pieces(sizes, first, self.capacity)

    @cached_property
    def patterns(self) -> Patterns:
        """The rows of every epoch, by the lengths in them."""
        return best_fit_patterns(self.histogram, self.capacity)

    def samples_per_epoch(self, epochs: int = 1) -> int:
        return epochs * self.patterns.rows

    def _cut_note(self) -> str:
        return f"{self.left_out.cut} documents of more than {self.limit} are read in several pieces"

    def segment(self, samples: int, seed: int) -> Segment:
        rows = self.patterns.rows
        epochs = -(-samples // rows)
        return Segment(epochs, epochs * rows, seed)

    def dataset(self, segments: Sequence[Segment], cache: IndexCache | None = None, name: str = "data") -> BestFitRows:
        def build() -> Arrays:
            return best_fit_index(self.pieces, len(self.data), self.histogram, self.patterns, segments)

        arrays = (cache or self.cache).arrays(f"{name}-best-fit", self.arrays_key(segments), build)
        self._forget()
        samples = sum(segment.samples for segment in segments)
        return BestFitRows(self.data, self.labels, capacity=self.capacity, samples=samples, key=self.key, arrays=arrays)


class BestFitRows(Rows):
    """The samples, see the module's docstring."""

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
        return [*self._wholes(found[:wholes]), *parts]

    def holding(self, items: range) -> np.ndarray:
        doc_idx, row_starts, shuffle_idx = (self.arrays[name] for name in ("doc_idx", "sample_idx", "shuffle_idx"))
        held = are_in(doc_idx, items)
        later = np.flatnonzero(are_in(self.arrays["later_documents"], items))
        if len(later):  # parts of an item follow one another
            held |= are_in(doc_idx, range(len(self.data) + int(later[0]), len(self.data) + int(later[-1]) + 1))
        rows = len(row_starts) - 1
        epoch, place = np.divmod(np.flatnonzero(held), int(row_starts[-1]))
        by_epoch = np.zeros((len(shuffle_idx) // rows, rows), dtype=bool)
        by_epoch[epoch, np.searchsorted(row_starts, place, side="right") - 1] = True
        return np.flatnonzero(np.take_along_axis(by_epoch, shuffle_idx.reshape(-1, rows).astype(np.int64), axis=1))


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
    # What lies behind the documents of the range is a later part.
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
