"""`pack_impl: unpacked`: one document per sample, the rest of the sample is padding.

The order of samples for a seed is GPT-NeoX's: rows are the documents in the order of the file, over and over, and the
rows asked for are shuffled. Documents that train nothing, or do not fit (`allow_chopped: false`), are passed over. A
run that is made longer goes on with the next document.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.data.index_builders import INT32_MAX
from megatron.data.packing.contract import Segment
from megatron.data.packing.holding import are_in
from megatron.data.packing.rows import Rows, WholeDocuments, shuffled_segments
from megatron.data.tokens.cache import Arrays, IndexCache


class Unpacked(WholeDocuments):
    """`pack_impl: unpacked` for the documents of one source."""

    kind = "unpacked"

    def samples_per_epoch(self, epochs: int = 1) -> int:
        return epochs * int(self.histogram.sum())

    def dataset(self, segments: Sequence[Segment], cache: IndexCache | None = None, name: str = "data") -> UnpackedRows:
        def build() -> Arrays:
            dtype = np.int32 if self.documents[1] <= INT32_MAX else np.int64
            usable = np.flatnonzero(self.pieces.lengths).astype(dtype)
            usable = usable + np.asarray(self.documents[0], dtype) if self.documents[0] else usable
            shuffle_idx = shuffled_segments(segments, np.random.RandomState(segments[0].seed))
            return {"doc_idx": usable, "shuffle_idx": shuffle_idx}

        arrays = (cache or self.cache).arrays(f"{name}-unpacked", self.arrays_key(segments), build)
        self._forget()
        samples = sum(segment.samples for segment in segments)
        return UnpackedRows(
            self.data, self.labels, capacity=self.capacity, samples=samples, key=self.key, arrays=arrays
        )


class UnpackedRows(Rows):
    """The samples, see the module's docstring."""

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        documents = self.arrays["doc_idx"]
        row = int(self.arrays["shuffle_idx"][index]) % len(documents)
        return self._wholes(documents[row : row + 1])

    def holding(self, items: range) -> np.ndarray:
        held = are_in(self.arrays["doc_idx"], items)
        return np.flatnonzero(held[self.arrays["shuffle_idx"] % len(held)])
