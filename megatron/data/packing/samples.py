"""Reading the samples of a packing by number, and finding those that hold a document."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from megatron.data.packing import Packing
from megatron.data.sample import IGNORE, NO_SAMPLES, Piece, Provenance, Sample, Wanted
from megatron.data.tokens.cache import Arrays, content_key


class PackedSamples(ABC):
    """The `samples` samples of a packing, a `SampleDataset` of the documents of one source.

    `indices` are its index arrays: one set, or one for each segment.
    """

    stream: ClassVar[bool] = False  # see the two kinds of `Sample`

    def __init__(self, packing: Packing, samples: int, indices: Sequence[Arrays]) -> None:
        self.data, self.labels, self.capacity = packing.data, packing.labels, packing.capacity
        self.key, self.samples, self.indices = packing.key, samples, indices

    @property
    def arrays(self) -> Arrays:
        return self.indices[0]

    @abstractmethod
    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """(document, offset, length) of what is in sample `index`."""

    @abstractmethod
    def find(self, items: range) -> np.ndarray:
        """The samples that may hold one of some items, ascending; may include numbers beyond the end."""

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`: `[seq_length + 1]` tokens, int64."""
        tokens = np.zeros(self.capacity, dtype=np.int64)
        labels = np.full(self.capacity, IGNORE, dtype=np.int64) if self.labels is not None else None
        starts, at = [], 0
        for document, offset, length in self._find_pieces(index):
            end = at + length
            tokens[at:end] = self.data.get(document, offset, length)
            if self.labels is not None and labels is not None:
                labels[at:end] = self.labels.get(document, offset, length)
            if offset == 0 or not self.stream:
                starts.append(at)
            at = end
        return Sample(tokens, np.asarray(starts, dtype=np.int64), labels, None if self.stream else at)

    def locate(self, index: int) -> Provenance:
        return Provenance((self.data.prefix,), index, tuple(Piece(*piece) for piece in self._find_pieces(index)))

    def may_hold(self, wanted: Wanted) -> np.ndarray:
        items = wanted.get(str(self.data.prefix))
        if items is None:
            return NO_SAMPLES
        found = self.find(items)
        return found[found < self.samples]

    def digest(self) -> str:
        return content_key({"data": self.key}, *(array for arrays in self.indices for array in arrays.values()))

    def _find_pieces(self, index: int) -> list[tuple[int, int, int]]:
        if not 0 <= index < self.samples:
            raise IndexError(f"{self.data.prefix}: sample {index} of {self.samples}")
        return self.pieces(index)

    def _whole(self, documents: np.ndarray) -> list[tuple[int, int, int]]:
        """Documents from their first token on, as many tokens as fit."""
        lengths = np.minimum(self.data.sizes[documents], self.capacity)
        return [(d, 0, length) for d, length in zip(documents.tolist(), lengths.tolist(), strict=True)]


def in_range(numbers: np.ndarray, items: range) -> np.ndarray:
    """bool, of the shape of `numbers`: which of them are in a range of step 1."""
    return (numbers >= items.start) & (numbers < items.stop)


def rows_over(begins: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Which rows (samples before the shuffle) contain one of some places, or begin directly after one.

    Args:
        begins: `[rows + 1]`, the place where each row begins, ascending, and the last one's end.
        hits: the places, ascending.

    Returns bool `[rows + 1]`; the last belongs to no row.
    """
    first = np.maximum(np.searchsorted(begins, hits, side="left") - 1, 0)
    last = np.searchsorted(begins, hits, side="right") - 1
    changes = np.zeros(len(begins) + 1, dtype=np.int64)
    np.add.at(changes, first, 1)
    np.add.at(changes, last + 1, -1)
    return np.cumsum(changes)[:-1] > 0
