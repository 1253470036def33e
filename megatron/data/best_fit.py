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

from megatron.data.best_fit_plan import Patterns, best_fit_patterns
from megatron.data.cache import Arrays, IndexCache
from megatron.data.index_builders import INT32_MAX
from megatron.data.index_builders.packing import by_length, fill_patterns, length_starts
from megatron.data.packing import Segment
from megatron.data.rows import Rows, WholeDocuments
from megatron.data.usable import LeftOut, Pieces, fragment_pieces

_CHUNK = 1 << 22  # documents counted at a time


class BestFit(WholeDocuments):
    """`pack_impl: best_fit` for the documents of one source."""

    kind = "best_fit"

    def _cut(self) -> tuple[Pieces, LeftOut]:
        if not self.allow_chopped:
            return super()._cut()
        return fragment_pieces(self.sizes, self.documents[0], self.capacity)

    @cached_property
    def _histogram(self) -> np.ndarray:
        lengths, counts = self.pieces.lengths, np.zeros(self.capacity + 1, np.int64)
        for start in range(0, len(lengths), _CHUNK):  # bincount makes int64 of what it counts
            counts += np.bincount(lengths[start : start + _CHUNK], minlength=len(counts))
        return counts

    @cached_property
    def patterns(self) -> Patterns:
        """The rows of every epoch, by the lengths in them."""
        return best_fit_patterns(self._histogram, self.capacity)

    @property
    def padding(self) -> float:
        """Share of padding in all samples, 0 to 1."""
        room = self.patterns.rows * self.capacity
        return 1.0 - int(self._histogram @ np.arange(self.capacity + 1)) / room if room else 0.0

    def samples_per_epoch(self, epochs: int = 1) -> int:
        return epochs * self.patterns.rows

    def notes(self) -> list[str]:
        return [*super().notes(), f"an epoch is {self.patterns.rows} samples, {self.padding:.2%} of them padding"]

    def _cut_note(self) -> str:
        return f"{self.left_out.cut} documents of more than {self.limit} are read in several pieces"

    def segment(self, samples: int, seed: int) -> Segment:
        rows = self.patterns.rows
        epochs = -(-samples // rows)
        return Segment(epochs, epochs * rows, seed)

    def dataset(self, segments: Sequence[Segment], cache: IndexCache | None = None, name: str = "data") -> BestFitRows:
        def build() -> Arrays:
            return best_fit_index(self.pieces, self._histogram, self.patterns, segments)

        arrays = (cache or self.cache).arrays(f"{name}-best-fit", self.arrays_key(segments), build)
        self._forget()
        samples = sum(segment.samples for segment in segments)
        return BestFitRows(self.data, self.labels, capacity=self.capacity, samples=samples, key=self.key, arrays=arrays)


class BestFitRows(Rows):
    """The samples, see the module's docstring."""

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        row_starts, doc_idx = self.arrays["sample_idx"], self.arrays["doc_idx"]
        epoch = index // (len(row_starts) - 1)
        row = int(self.arrays["shuffle_idx"][index])
        start, end = (row_starts[row : row + 2] + epoch * int(row_starts[-1])).tolist()
        documents = doc_idx[start:end]
        if "offset_idx" not in self.arrays:
            return self._wholes(documents)
        offsets = self.arrays["offset_idx"][start:end]
        lengths = np.minimum(self.data.sizes[documents] - offsets, self.capacity)
        return list(zip(documents.tolist(), offsets.tolist(), lengths.tolist(), strict=True))


def best_fit_index(pieces: Pieces, histogram: np.ndarray, patterns: Patterns, segments: Sequence[Segment]) -> Arrays:
    """The arrays of some segments.

    Returns `doc_idx` int32 (int64 beyond 2^31 items) `[epochs * pieces]`, epoch after epoch and row after row;
    `sample_idx` int64 `[rows + 1]`, where the rows of an epoch begin among its pieces, the same in each; `shuffle_idx`
    uint32 or int64 `[epochs * rows]`, the row to read in its epoch; and, when documents are in several pieces,
    `offset_idx` int32 like `doc_idx`, where in its document each begins.
    """
    last = pieces.first + len(pieces.lengths) if pieces.documents is None else int(pieces.documents[-1])
    starts = length_starts(histogram)
    small = max(last, len(pieces.lengths)) <= INT32_MAX
    sorted_once = by_length(pieces.lengths, starts, np.int32 if small else np.int64)
    row_starts, rows = patterns.row_starts(), patterns.rows
    epochs, count = sum(segment.epochs for segment in segments), len(sorted_once)
    doc_idx = np.empty(epochs * count, dtype=sorted_once.dtype)
    shuffle_idx = np.empty(epochs * rows, dtype=np.uint32 if rows < 2**32 else np.int64)
    offset_idx = np.empty(epochs * count, dtype=np.int32) if pieces.offsets is not None else None
    borders = np.unique(starts).tolist()
    drawn = [(segment.seed, number) for segment in segments for number in range(segment.epochs)]
    for epoch, seed in enumerate(drawn):
        rng = np.random.RandomState(seed)
        order = sorted_once.copy()
        for a, b in pairwise(borders):
            rng.shuffle(order[a:b])
        found = fill_patterns(order, starts, patterns.counts, patterns.paths, patterns.sizes, patterns.copies)
        here = slice(epoch * count, (epoch + 1) * count)
        doc_idx[here] = found + pieces.first if pieces.documents is None else pieces.documents[found]
        if offset_idx is not None and pieces.offsets is not None:
            offset_idx[here] = pieces.offsets[found]
        permutation = np.arange(rows, dtype=shuffle_idx.dtype)
        rng.shuffle(permutation)
        shuffle_idx[epoch * rows : (epoch + 1) * rows] = permutation
    arrays = {"doc_idx": doc_idx, "sample_idx": row_starts, "shuffle_idx": shuffle_idx}
    return arrays if offset_idx is None else {**arrays, "offset_idx": offset_idx}
