"""`pack_impl: unpacked`: one document per sample, the rest of the sample is padding.

The order of samples for a seed is GPT-NeoX's: rows are the documents in the order of the file, over and over, and the
rows asked for are shuffled. Documents that train nothing, or do not fit (`allow_chopped: false`), are skipped. A run
that is made longer continues with the next document.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.data.index_builders import INT32_MAX
from megatron.data.packing import PACKINGS, Segment
from megatron.data.packing.samples import PackedSamples, in_range
from megatron.data.packing.whole_documents import WholeDocuments, shuffle_rows
from megatron.data.tokens.cache import Arrays


class UnpackedSamples(PackedSamples):
    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        documents = self.arrays["doc_idx"]
        row = int(self.arrays["shuffle_idx"][index]) % len(documents)
        return self._whole(documents[row : row + 1])

    def find(self, items: range) -> np.ndarray:
        held = in_range(self.arrays["doc_idx"], items)
        return np.flatnonzero(held[self.arrays["shuffle_idx"] % len(held)])


@PACKINGS.register("unpacked", answers="apart")
class Unpacked(WholeDocuments):
    """One document per sample, the rest is padding."""

    kind, entry, samples_type = "unpacked", "unpacked", UnpackedSamples

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.data.sides)

    def samples_per_epoch(self, epochs: int = 1) -> int:
        return epochs * int(self.histogram.sum())

    def build_index(self, segments: Sequence[Segment]) -> Arrays:
        dtype = np.int32 if self.documents[1] <= INT32_MAX else np.int64
        usable = np.flatnonzero(self.pieces.lengths).astype(dtype)
        usable = usable + np.asarray(self.documents[0], dtype) if self.documents[0] else usable
        return {"doc_idx": usable, "shuffle_idx": shuffle_rows(segments, np.random.RandomState(segments[0].seed))}
