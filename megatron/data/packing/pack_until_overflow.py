"""`pack_impl: pack_until_overflow`: whole documents, one after the other, until the next would not fit any more.

The order of samples for a seed is GPT-NeoX's. With one generator:

    shuffle_idx = the rows, shuffled
    doc_idx     = the documents, shuffled; at the end shuffled once more, and so on
    sample_idx  = where each row begins in doc_idx

Documents that train nothing, or do not fit (`allow_chopped: false`), are skipped. GPT-NeoX ends as soon as the last
row has been begun, so that it holds one document; here it is filled like the others. The rest of the order is the same.

A run that is made longer continues the same walk over the documents, so nothing repeats before all have been read; only
the new rows are shuffled by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron.data.index_builders import INT32_MAX
from megatron.data.index_builders.packing import overflow_pass
from megatron.data.index_builders.shuffle import shuffle
from megatron.data.packing import PACKINGS, Segment, count_samples
from megatron.data.packing.samples import PackedSamples, in_range, rows_over
from megatron.data.packing.whole_documents import WholeDocuments, shuffle_rows
from megatron.data.tokens.cache import Arrays, content_key

_WORTH_KEEPING = 1_000_000  # documents from which on the number of rows in a pass is kept in the cache


class OverflowSamples(PackedSamples):
    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        row = int(self.arrays["shuffle_idx"][index])
        start, end = self.arrays["sample_idx"][row : row + 2, 0].tolist()
        return self._whole(self.arrays["doc_idx"][start:end])

    def find(self, items: range) -> np.ndarray:
        hits = np.flatnonzero(in_range(self.arrays["doc_idx"], items))
        return np.flatnonzero(rows_over(self.arrays["sample_idx"][:, 0], hits)[self.arrays["shuffle_idx"]])


@PACKINGS.register("pack_until_overflow", answers="joined")
class PackUntilOverflow(WholeDocuments):
    """Whole documents one after the other until the next does not fit, then padding."""

    kind, entry, samples_type = "pack_until_overflow", "overflow", OverflowSamples

    @cached_property
    def _rows_of_one_pass(self) -> int:
        if not self.histogram.any():
            return 0
        if len(self.sizes) < _WORTH_KEEPING:
            return self._count_rows()
        key = content_key({"data": self.key, "kind": "rows of a pass"})
        kept = self.cache.arrays(f"{self.name}-overflow-rows", key, lambda: {"rows": np.asarray([self._count_rows()])})
        return int(kept["rows"][0])

    def _count_rows(self) -> int:
        order = _documents(len(self.pieces.lengths))
        shuffle(np.random.RandomState(0), order)
        return len(overflow_pass(self.pieces.lengths, order, self.capacity, 0, len(order))[1])

    def samples_per_epoch(self, epochs: int = 1) -> int:
        """Rows that the documents fill in a shuffled order. How many the run's own order fills differs by a few."""
        return epochs * self._rows_of_one_pass

    def build_index(self, segments: Sequence[Segment]) -> Arrays:
        return overflow_index(self.pieces.lengths, self.documents[0], self.capacity, segments)


def overflow_index(lengths: np.ndarray, first: int, capacity: int, segments: Sequence[Segment]) -> Arrays:
    """The three arrays, with GPT-NeoX's names and layouts (module docstring).

    Args:
        lengths: int32 `[documents]`, 0 for those that are not used; one at least is.
        first: number of the first document.
        capacity: tokens of a row, seq_length + 1.
        segments: one after the other.

    Returns `doc_idx` int32 (int64 beyond 2^31 documents) `[entries]`, `sample_idx` int32 or int64 `[rows + 1, 2]` whose
    second column, the offset in a document, is 0, and `shuffle_idx` int64 `[rows]`.
    """
    rows = count_samples(segments)
    rng = np.random.RandomState(segments[0].seed)
    shuffle_idx = shuffle_rows(segments, rng)
    order = _documents(len(lengths))
    passes, begins, entries, begun, running = [], [], 0, 0, 0
    while True:
        shuffle(rng, order)
        used = order.copy()
        # One more than the rows asked for: it would begin where the last one ends.
        kept, starts, running = overflow_pass(lengths, used, capacity, running, rows + 1 - begun)
        passes.append(used[:kept])
        begins.append(starts + entries)
        entries, begun = entries + kept, begun + len(starts)
        if begun > rows:
            break
    ends = np.concatenate(begins)
    doc_idx = (np.concatenate(passes) if len(passes) > 1 else passes[0])[: ends[rows]]
    if first:
        doc_idx = doc_idx + np.asarray(first, dtype=np.int32 if first + len(lengths) <= INT32_MAX else np.int64)
    sample_idx = np.zeros((rows + 1, 2), dtype=np.int32 if max(entries, 2 * (rows + 1)) < INT32_MAX else np.int64)
    sample_idx[:, 0] = ends[: rows + 1]
    return {"doc_idx": doc_idx, "sample_idx": sample_idx, "shuffle_idx": shuffle_idx}


def _documents(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32 if count <= INT32_MAX else np.int64)
