"""`pack_impl: packed`: documents joined end to end into one stream, cut every `seq_length` tokens.

The order of samples for a seed is GPT-NeoX's. With `tokens` in the documents and `e` the fewest whole epochs that give
the samples asked for:

    doc_idx     = e copies of the documents, shuffled all together
    samples     = (e * tokens - 1) // seq_length
    sample_idx  = where each sample starts in the stream of doc_idx
    shuffle_idx = the samples, shuffled (by the same generator)

GPT-NeoX gives the length as one less and never reads the last entry of shuffle_idx; here it is counted, and the order
of all others is the same.

**Kept segments.** Asking for more samples changes `e` and with it the order of everything. So a run that is made longer
keeps the segments of its checkpoint, and the missing samples come from one more segment with its own shuffle. The past
does not change, and no token repeats before the segment is used up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np

from megatron.data.index_builders import INT32_MAX, build_sample_index
from megatron.data.index_builders.shuffle import shuffle
from megatron.data.packing import PACKINGS, Packing, Segment, count_samples
from megatron.data.packing.samples import PackedSamples, in_range, rows_over
from megatron.data.tokens.cache import Arrays, content_key
from megatron.errors import UserError

INDEX_VERSION = 1  # part of every cache key: raise it when the arrays change


@PACKINGS.register("packed")
class Packed(Packing):
    """One stream of all documents, cut every seq_length tokens; nothing is skipped."""

    @cached_property  # 1e8 documents are hashed in a quarter of a second
    def key(self) -> str:
        described = {"kind": "packed", "version": INDEX_VERSION, "documents": list(self.documents)}
        return content_key(described | {"seq_length": self.seq_length}, self.sizes)

    @cached_property
    def tokens(self) -> int:
        return int(self.sizes.sum(dtype=np.int64))

    def samples_per_epoch(self, epochs: int = 1) -> int:
        return max(0, (epochs * self.tokens - 1) // self.seq_length)

    def epochs(self, samples: int) -> float:
        return samples * self.seq_length / self.tokens if self.tokens else 0.0

    def check_usable(self, what: str) -> None:
        if self.tokens < self.capacity:
            raise UserError(
                f"{what}: {self.tokens} tokens are too few; a sample of seq_length {self.seq_length} needs at least "
                f"{self.capacity} tokens (the inputs and the last target). Use more data or a shorter seq_length."
            )

    def segment(self, samples: int, seed: int) -> Segment:
        epochs = -(-(samples * self.seq_length + 1) // self.tokens)
        return Segment(epochs, self.samples_per_epoch(epochs), seed)

    def dataset(self, segments: Sequence[Segment]) -> StreamSamples:
        return StreamSamples(self, segments, [self._index(segment) for segment in segments])

    def _index(self, segment: Segment) -> Arrays:
        described = {"epochs": segment.epochs, "seed": segment.seed, "samples": segment.samples}
        key = content_key({"data": self.key, **described})
        build = partial(packed_index, self.data.sizes, self.documents, self.seq_length, segment)
        return self.cache.arrays(f"{self.name}-packed", key, build)


class StreamSamples(PackedSamples):
    """The samples of `segments`, in their order; each segment has its own index arrays."""

    stream = True

    def __init__(self, packing: Packing, segments: Sequence[Segment], indices: Sequence[Arrays]) -> None:
        super().__init__(packing, count_samples(segments), indices)
        self._ends = np.cumsum([segment.samples for segment in segments])

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        which = int(np.searchsorted(self._ends, index, side="right"))
        arrays = self.indices[which]
        before = int(self._ends[which - 1]) if which else 0
        row = int(arrays["shuffle_idx"][index - before])
        (first, offset), (last, end) = arrays["sample_idx"][row : row + 2].tolist()
        pieces = []
        for position in range(first, last + 1):
            document = int(arrays["doc_idx"][position])
            start = offset if position == first else 0
            stop = end + 1 if position == last else int(self.data.sizes[document])
            if stop > start:
                pieces.append((document, start, stop - start))
        return pieces

    def find(self, items: range) -> np.ndarray:
        found = []
        for before, arrays in zip([0, *self._ends[:-1].tolist()], self.indices, strict=True):
            hits = np.flatnonzero(in_range(arrays["doc_idx"], items))
            held = rows_over(arrays["sample_idx"][:, 0], hits)
            found.append(before + np.flatnonzero(held[arrays["shuffle_idx"]]))
        return np.concatenate(found)


def packed_index(sizes: np.ndarray, documents: tuple[int, int], seq_length: int, segment: Segment) -> Arrays:
    """The three arrays of a segment, with GPT-NeoX's names, layouts and values (see above).

    `doc_idx` int32 `[epochs * documents]`, `sample_idx` int32 or int64 `[samples + 1, 2]`, `shuffle_idx` uint32 or
    int64 `[samples]`.
    """
    first, end = documents
    rng = np.random.RandomState(segment.seed)
    doc_idx = np.tile(np.arange(first, end, dtype=np.int32 if end <= INT32_MAX else np.int64), segment.epochs)
    shuffle(rng, doc_idx)
    sample_idx = build_sample_index(sizes, doc_idx, seq_length, segment.samples)
    shuffle_idx = np.arange(segment.samples, dtype=np.uint32 if segment.samples < 2**32 - 1 else np.int64)
    shuffle(rng, shuffle_idx)
    return {"doc_idx": doc_idx, "sample_idx": sample_idx, "shuffle_idx": shuffle_idx}
