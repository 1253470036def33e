"""`pack_impl: packed`: documents joined end to end into one stream, cut every `seq_length` tokens.

The order of samples for a seed is GPT-NeoX's. With `tokens` in the documents and `e` the fewest whole epochs that give
the samples asked for:

    doc_idx     = e copies of the documents, shuffled all together
    samples     = (e * tokens - 1) // seq_length
    sample_idx  = where each sample starts in the stream of doc_idx
    shuffle_idx = the samples, shuffled (the same generator goes on)

GPT-NeoX gives the length as one less and never reads the last entry of shuffle_idx; here it is counted, and the order
of all others is the same.

**Frozen sample counts.** Asking for more samples changes `e` and with it the order of everything, so a run that is
continued for longer does not ask again: its state keeps the segments it was using, and what is missing comes from a
further segment with its own shuffle. The past stays as it was, and no token repeats before the segment is used up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron.data.index_builders import INT32_MAX, build_sample_index
from megatron.data.index_builders.shuffle import shuffle
from megatron.data.packing.contract import Packing, Segment, fresh_seed
from megatron.data.packing.holding import NONE, Wanted, are_in, rows_touching
from megatron.data.sample import Piece, Provenance, Sample
from megatron.data.tokens.cache import Arrays, IndexCache, content_key
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.labels import check_labels
from megatron.errors import UserError

INDEX_VERSION = 1  # part of every cache key: raise it when the arrays change


def epochs_needed(tokens: int, seq_length: int, samples: int) -> int:
    """The fewest whole epochs, at least 1, of `tokens` tokens that give `samples` samples."""
    return max(1, -(-(samples * seq_length + 1) // tokens))


def samples_in(tokens: int, seq_length: int, epochs: int = 1) -> int:
    """Samples in `epochs` joined epochs of `tokens` tokens."""
    return max(0, (epochs * tokens - 1) // seq_length)


def plan_segments(
    tokens: int, seq_length: int, samples: int, seed: int, frozen: Sequence[Segment] = (), what: str = "the data"
) -> tuple[Segment, ...]:
    """The segments that give at least `samples` samples: the `frozen` ones, and one more if they are too few.

    Raises `UserError` naming `what` when the documents hold less than one sample.
    """
    if tokens < seq_length + 1:
        raise UserError(
            f"{what}: {tokens} tokens are too few; a sample of seq_length {seq_length} needs at least "
            f"{seq_length + 1} tokens (the inputs and the last target). Use more data or a shorter seq_length."
        )
    missing = samples - sum(segment.samples for segment in frozen)
    if frozen and missing <= 0:
        return tuple(frozen)
    epochs = epochs_needed(tokens, seq_length, missing)
    return (*frozen, Segment(epochs, samples_in(tokens, seq_length, epochs), fresh_seed(seed, len(frozen))))


class PackedDataset:
    """The samples of a range of documents, in the order of its segments.

    Args:
        data: the tokens; every item counts as a document.
        seq_length: tokens per sample; a `Sample` holds one more.
        segments: see `plan_segments`.
        documents: half-open range of items to use, all by default.
        labels: dataset of equal item sizes whose -100 marks tokens that are not trained.
        cache: where the index arrays are kept.
        key: `packed_key` of these documents, when it is known already.

    Indices outside `[0, len)` raise `IndexError`; nothing wraps around.
    """

    def __init__(
        self,
        data: IndexedDataset,
        *,
        seq_length: int,
        segments: Sequence[Segment],
        documents: tuple[int, int] | None = None,
        labels: IndexedDataset | None = None,
        cache: IndexCache | None = None,
        name: str = "data",
        key: str | None = None,
    ) -> None:
        self.data, self.labels, self.seq_length = data, labels, seq_length
        self.segments = tuple(segments)
        self.documents = documents or (0, len(data))
        if labels is not None:
            check_labels(data, labels)
        self.key = key or packed_key(data, self.documents, seq_length)
        cache = cache or IndexCache(None)
        self._indices = [self._index(segment, cache, name) for segment in self.segments]
        self._ends = np.cumsum([segment.samples for segment in self.segments])

    def _index(self, segment: Segment, cache: IndexCache, name: str) -> Arrays:
        key = content_key(
            {"data": self.key, "epochs": segment.epochs, "seed": segment.seed, "samples": segment.samples}
        )

        def build() -> Arrays:
            return packed_index(self.data.sizes, self.documents, self.seq_length, segment)

        return cache.arrays(f"{name}-packed", key, build)

    def digest(self) -> str:
        """Hash of the index arrays themselves, for ranks to compare what they built. Reads all of them."""
        return content_key({"data": self.key}, *(array for arrays in self._indices for array in arrays.values()))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`: `[seq_length + 1]` tokens, int64, and where documents begin in it."""
        return self._read(self._pieces(index))

    def locate(self, index: int) -> Provenance:
        """The documents that sample `index` is made of."""
        return Provenance((self.data.prefix,), index, tuple(Piece(*piece) for piece in self._pieces(index)))

    def may_hold(self, wanted: Wanted) -> np.ndarray:
        """Samples that may hold some documents."""
        items = wanted.get(str(self.data.prefix))
        if items is None:
            return NONE
        begins, found = [0, *self._ends[:-1].tolist()], []
        for before, arrays in zip(begins, self._indices, strict=True):
            hits = np.flatnonzero(are_in(arrays["doc_idx"], items))
            held = rows_touching(arrays["sample_idx"][:, 0], hits)
            found.append(before + np.flatnonzero(held[arrays["shuffle_idx"]]))
        return np.concatenate(found)

    def _pieces(self, index: int) -> list[tuple[int, int, int]]:
        """(document, offset, length) of the pieces of sample `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.data.prefix}: sample {index} of {len(self)}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        arrays = self._indices[which]
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

    def _read(self, pieces: list[tuple[int, int, int]]) -> Sample:
        tokens = np.empty(self.seq_length + 1, dtype=np.int64)
        labels = np.empty_like(tokens) if self.labels is not None else None
        starts, at = [], 0
        for document, offset, length in pieces:
            tokens[at : at + length] = self.data.get(document, offset, length)
            if self.labels is not None and labels is not None:
                labels[at : at + length] = self.labels.get(document, offset, length)
            if offset == 0:
                starts.append(at)
            at += length
        return Sample(tokens, np.asarray(starts, dtype=np.int64), labels)


class Packed(Packing):
    """`pack_impl: packed` for the documents of one source. Nothing is too long here and nothing is skipped."""

    @cached_property  # 1e8 documents are hashed in a quarter of a second
    def key(self) -> str:
        return packed_key(self.data, self.documents, self.seq_length)

    @cached_property
    def tokens(self) -> int:
        first, end = self.documents
        return int(self.data.sizes[first:end].sum(dtype=np.int64))

    def samples_per_epoch(self, epochs: int = 1) -> int:
        return samples_in(self.tokens, self.seq_length, epochs)

    def epochs(self, samples: int) -> float:
        return samples * self.seq_length / self.tokens if self.tokens else 0.0

    def plan(
        self, samples: int, seed: int, frozen: Sequence[Segment] = (), what: str = "the data"
    ) -> tuple[Segment, ...]:
        return plan_segments(self.tokens, self.seq_length, samples, seed, frozen, what)

    def dataset(
        self, segments: Sequence[Segment], cache: IndexCache | None = None, name: str = "data"
    ) -> PackedDataset:
        return PackedDataset(
            self.data,
            seq_length=self.seq_length,
            segments=segments,
            documents=self.documents,
            labels=self.labels,
            cache=cache,
            name=name,
            key=self.key,
        )


def packed_key(data: IndexedDataset, documents: tuple[int, int], seq_length: int) -> str:
    """Hash of what the order of samples depends on besides the segments: sizes of the documents, range, length."""
    first, end = documents
    described = {"kind": "packed", "version": INDEX_VERSION, "documents": [first, end], "seq_length": seq_length}
    return content_key(described, data.sizes[first:end])


def packed_index(sizes: np.ndarray, documents: tuple[int, int], seq_length: int, segment: Segment) -> Arrays:
    """The three arrays of a segment, with GPT-NeoX's names, layouts and values (module docstring).

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
