"""`pack_impl: pack_until_overflow`: whole documents, one after the other, until the next would not fit any more.

The order of samples for a seed is GPT-NeoX's. With one generator:

    shuffle_idx = the rows, shuffled
    doc_idx     = the documents, shuffled; at the end shuffled once more, and so on
    sample_idx  = where each row begins in doc_idx

Documents that train nothing, or do not fit (`allow_chopped: false`), are passed over. GPT-NeoX ends as soon as the last
row has been begun, so that it holds one document; here it is filled like the others. The rest of the order is the same.

A run that is made longer goes on in the same walk over the documents where it stopped, so nothing repeats before all
have been read; only the new rows are shuffled by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron.data.index_builders import INT32_MAX
from megatron.data.index_builders.packing import overflow_pass
from megatron.data.index_builders.shuffle import shuffle
from megatron.data.packing.contract import Segment
from megatron.data.packing.holding import are_in, rows_touching
from megatron.data.packing.rows import Rows, WholeDocuments, shuffled_segments
from megatron.data.tokens.cache import Arrays, IndexCache, content_key

_WORTH_KEEPING = 1_000_000  # documents from which on the number of rows in a pass is kept in the cache


class PackUntilOverflow(WholeDocuments):
    """`pack_impl: pack_until_overflow` for the documents of one source."""

    kind = "pack_until_overflow"

    @cached_property
    def _rows_of_one_pass(self) -> int:
        if not self.histogram.any():
            return 0
        if len(self.sizes) < _WORTH_KEEPING:
            return self._count_rows()
        key = content_key({"data": self.key, "kind": "rows of a pass"})
        kept = self.cache.arrays(
            f"{Path(self.data.prefix).name}-overflow-rows", key, lambda: {"rows": np.asarray([self._count_rows()])}
        )
        return int(kept["rows"][0])

    def _count_rows(self) -> int:
        order = _documents(len(self.pieces.lengths))
        shuffle(np.random.RandomState(0), order)
        return len(overflow_pass(self.pieces.lengths, order, self.capacity, 0, len(order))[1])

    def samples_per_epoch(self, epochs: int = 1) -> int:
        """Rows that the documents fill in a shuffled order. How many the run's own order fills differs by a few."""
        return epochs * self._rows_of_one_pass

    def dataset(self, segments: Sequence[Segment], cache: IndexCache | None = None, name: str = "data") -> OverflowRows:
        def build() -> Arrays:
            return overflow_index(self.pieces.lengths, self.documents[0], self.capacity, segments)

        arrays = (cache or self.cache).arrays(f"{name}-overflow", self.arrays_key(segments), build)
        self._forget()
        samples = sum(segment.samples for segment in segments)
        return OverflowRows(
            self.data, self.labels, capacity=self.capacity, samples=samples, key=self.key, arrays=arrays
        )


class OverflowRows(Rows):
    """The samples, see the module's docstring."""

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        row = int(self.arrays["shuffle_idx"][index])
        start, end = self.arrays["sample_idx"][row : row + 2, 0].tolist()
        return self._wholes(self.arrays["doc_idx"][start:end])

    def holding(self, items: range) -> np.ndarray:
        hits = np.flatnonzero(are_in(self.arrays["doc_idx"], items))
        return np.flatnonzero(rows_touching(self.arrays["sample_idx"][:, 0], hits)[self.arrays["shuffle_idx"]])


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
    rows = sum(segment.samples for segment in segments)
    rng = np.random.RandomState(segments[0].seed)
    shuffle_idx = shuffled_segments(segments, rng)
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
