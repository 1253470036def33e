"""Reading the samples of a packing by number, and finding those that hold a document."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from megatron.data.packing import Packing
from megatron.data.packing.usable import kept_tokens
from megatron.data.sample import IGNORE, NO_SAMPLES, Item, Piece, Provenance, Sample, Wanted
from megatron.data.tokens.cache import Arrays, content_key


class PackedSamples(ABC):
    """The `samples` samples of a packing, a `SampleDataset` of the documents of one source.

    `indices` are its index arrays: one set, or one for each segment.
    """

    stream: ClassVar[bool] = False  # see the two kinds of `Sample`

    def __init__(self, packing: Packing, samples: int, indices: Sequence[Arrays]) -> None:
        self.data, self.labels, self.capacity = packing.data, packing.labels, packing.capacity
        self.rows, self.rewards, self.compares = packing.rows, packing.rewards, packing.compares
        self.references = packing.references
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

    def __getitem__(self, index: int) -> Item:
        """Sample `index`: `[seq_length + 1]` tokens, int64; of a pair that has two rows, one such sample for each."""
        parts = self._parts(index)
        return self._row(parts) if self.rows == 1 else tuple(self._row([part]) for part in parts)

    def _row(self, parts: Sequence[Piece]) -> Sample:
        tokens = np.zeros(self.capacity, dtype=np.int64)
        labelled = self.labels is not None or len(self.data.sides) > 1
        labels = np.full(self.capacity, IGNORE, dtype=np.int64) if labelled else None
        answers = np.full(self.capacity, -1, dtype=np.int64) if self.compares else None
        starts, at = [], 0
        for number, part in enumerate(parts):
            end = at + part.length
            tokens[at:end] = self.data.sides[part.side].get(part.document, part.offset, part.length)
            if labels is not None:
                labels[at:end] = self._labels_of(part, tokens[at:end])
            if answers is not None:
                answers[at:end] = number
            if part.offset == 0 or not self.stream:
                starts.append(at)
            at = end
        length, borders = None if self.stream else at, np.asarray(starts, dtype=np.int64)
        return Sample(tokens, borders, labels, length, answers, self._extras(parts))

    def _labels_of(self, part: Piece, tokens: np.ndarray) -> np.ndarray:
        """Labels of a piece. Those of a pair without any are the tokens behind what both texts begin with."""
        if self.labels is not None:
            return self.labels.sides[part.side].get(part.document, part.offset, part.length)
        texts = [side.get(part.document) for side in self.data.sides]
        # A text of which the other is the beginning still has its last token to compare.
        same = min(common_start(*texts), len(tokens) - 1)
        return np.where(np.arange(len(tokens)) < same, IGNORE, tokens)

    def _extras(self, parts: Sequence[Piece]) -> dict[str, np.ndarray]:
        found = {}
        if self.rewards is not None:
            values = [self.rewards.get(part.document)[0] for part in parts]
            found["reward" if len(self.data.sides) == 1 else "margin"] = np.asarray(values, dtype=np.float32)
        if self.references is not None:
            found["reference"], at = np.zeros(self.capacity, dtype=np.float32), 0
            for part in parts:  # nothing for the first token, which is no target
                side = self.references.sides[part.side]
                found["reference"][at + 1 : at + part.length] = side.get(part.document, part.offset, part.length - 1)
                at += part.length
        return found

    def locate(self, index: int) -> Provenance:
        return Provenance((self.data.prefix,), index, tuple(self._parts(index)))

    def _parts(self, index: int) -> list[Piece]:
        """What is in sample `index`; of a pair both texts, the chosen first."""
        return [part for piece in self._find_pieces(index) for part in self._texts(*piece)]

    def _texts(self, document: int, offset: int, length: int) -> list[Piece]:
        sides = self.data.sides
        if len(sides) == 1:
            return [Piece(document, offset, length)]
        sizes = np.array([[side.sizes[document]] for side in sides])
        kept = kept_tokens(sizes, self.capacity, self.rows)[:, 0].tolist()
        return [Piece(document, 0, tokens, side) for side, tokens in enumerate(kept)]

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
        """Documents from their first token on, as many tokens as fit; of pairs see `_texts`."""
        lengths = np.minimum(self.data.sizes[documents], self.capacity)
        return [(d, 0, length) for d, length in zip(documents.tolist(), lengths.tolist(), strict=True)]


def common_start(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts have in common at their beginning."""
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter


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
