"""Packings of whole documents: a sample is a row of documents, and padding where none fits any more.

Common to pack_until_overflow, unpacked and best_fit. Rows hold at most seq_length + 1 tokens; see `Sample` for what is
trained in them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from megatron.data.index_builders.shuffle import shuffle
from megatron.data.packing.contract import Packing, Segment, fresh_seed
from megatron.data.packing.holding import NONE, Wanted
from megatron.data.packing.usable import CHUNK_PIECES, LeftOut, Pieces, whole_pieces, without_silent
from megatron.data.sample import IGNORE, Piece, Provenance, Sample
from megatron.data.tokens.cache import Arrays, content_key
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError


class WholeDocuments(Packing):
    """What the packings of whole documents have in common: which documents they use, and their key."""

    kind: ClassVar[str]
    version: ClassVar[int] = 1  # part of every cache key: raise it when the arrays change
    counted: ClassVar[str] = "documents"  # what rows are made of, in words

    @property
    def capacity(self) -> int:
        """Tokens that a row holds."""
        return self.seq_length + 1

    @property
    def sizes(self) -> np.ndarray:
        """int32 `[documents]`, of the range."""
        first, end = self.documents
        return self.data.sizes[first:end]

    def _cut(self, sizes: np.ndarray, first: int) -> tuple[Pieces, LeftOut]:
        """What documents of these sizes, numbered from `first`, offer to rows; labels aside."""
        return whole_pieces(sizes, first, self.capacity, self.allow_chopped)

    @cached_property
    def pieces(self) -> Pieces:
        """What is put into rows: arrays over all documents, for building an index and for where labels decide."""
        pieces, _ = self._cut(self.sizes, self.documents[0])
        return without_silent(pieces, self.labels, self.cache, Path(self.data.prefix).name)

    @cached_property
    def _survey(self) -> tuple[np.ndarray, LeftOut]:
        """The next two. Goes through the documents in stretches, so that a start without building takes no memory."""
        counts, left_out = np.zeros(self.capacity + 1, np.int64), LeftOut()
        for start in range(0, len(self.sizes), CHUNK_PIECES):
            pieces, here = self._cut(self.sizes[start : start + CHUNK_PIECES], 0)
            counts += np.bincount(pieces.lengths, minlength=len(counts))
            left_out = left_out.plus(here)
        fitting = int(counts[1:].sum())
        if self.labels is not None:
            lengths, counts = self.pieces.lengths, np.zeros_like(counts)
            for start in range(0, len(lengths), CHUNK_PIECES):
                counts += np.bincount(lengths[start : start + CHUNK_PIECES], minlength=len(counts))
        counts[:2] = 0
        return counts, replace(left_out, silent=fitting - int(counts.sum()))

    @property
    def histogram(self) -> np.ndarray:
        """int64 `[capacity + 1]`: how many pieces of each length are used."""
        return self._survey[0]

    @property
    def left_out(self) -> LeftOut:
        return self._survey[1]

    @property
    def tokens(self) -> int:
        """Tokens that are read in a pass."""
        return int(self.histogram @ np.arange(self.capacity + 1))

    @property
    def padding(self) -> float:
        """Share of padding in the samples of a pass, 0 to 1."""
        room = self.samples_per_epoch() * self.capacity
        return max(0.0, 1.0 - self.tokens / room) if room else 0.0

    def _forget(self) -> None:
        """Let go of the arrays over all documents, once the index is there. What is small stays known."""
        if "pieces" in self.__dict__:
            _ = self.key, self._survey
            del self.__dict__["pieces"]

    @cached_property
    def key(self) -> str:
        first, end = self.documents
        described = {"kind": self.kind, "version": self.version, "documents": [first, end]}
        described |= {"seq_length": self.seq_length, "allow_chopped": self.allow_chopped}
        decided = [np.packbits(self.pieces.lengths > 0)] if self.labels is not None else []
        return content_key(described, self.sizes, *decided)

    def notes(self) -> list[str]:
        out, said = self.left_out, []
        if out.too_long:
            said.append(
                f"{out.too_long} documents of more than {self.limit} are left out (allow_chopped: true cuts them)"
            )
        if out.cut:
            said.append(self._cut_note())
        if out.silent:
            why = "less than two tokens, or all labels -100" if self.labels is not None else "less than two tokens"
            said.append(f"{out.silent} {self.counted} train nothing ({why}) and are left out")
        if rows := self.samples_per_epoch():
            said.append(f"an epoch is {rows} sample{'s' * (rows != 1)}, {self.padding:.2%} of them padding")
        return said

    @property
    def limit(self) -> str:
        """What a row holds, in words."""
        return f"{self.capacity} tokens (seq_length + 1)"

    def _cut_note(self) -> str:
        out = self.left_out
        return f"{out.cut} documents are cut to {self.limit}, which loses {out.cut_tokens} tokens"

    def check_any(self, what: str) -> None:
        """Raise `UserError` when no document can be used."""
        if not self.histogram.any():
            why = "; ".join(self.notes()) or "there are none"
            raise UserError(f"{what}: no document can be trained on with pack_impl {self.kind}: {why}.")

    def plan(
        self, samples: int, seed: int, frozen: Sequence[Segment] = (), what: str = "the data"
    ) -> tuple[Segment, ...]:
        self.check_any(what)
        missing = samples - sum(segment.samples for segment in frozen)
        if frozen and missing <= 0:
            return tuple(frozen)
        return (*frozen, self.segment(max(missing, 1), fresh_seed(seed, len(frozen))))

    def segment(self, samples: int, seed: int) -> Segment:
        """A segment of at least `samples` samples."""
        return Segment(0, samples, seed)

    def arrays_key(self, segments: Sequence[Segment]) -> str:
        """Hash of what the index arrays of some segments depend on."""
        described = [[segment.epochs, segment.samples, segment.seed] for segment in segments]
        return content_key({"data": self.key, "segments": described})


class Rows(ABC):
    """The samples of a packing of whole documents, read by number.

    Args:
        data, labels: the tokens and their labels.
        capacity: tokens per row, padding included.
        samples: how many there are.
        key: hash of what their order depends on.
        arrays: index arrays, for `digest`.

    Indices outside `[0, len)` raise `IndexError`; nothing wraps around.
    """

    def __init__(
        self,
        data: IndexedDataset,
        labels: IndexedDataset | None,
        *,
        capacity: int,
        samples: int,
        key: str,
        arrays: Arrays,
    ) -> None:
        self.data, self.labels, self.capacity, self.samples, self.key = data, labels, capacity, samples, key
        self.arrays = arrays

    def __len__(self) -> int:
        return self.samples

    def digest(self) -> str:
        """Hash of the index arrays themselves, for ranks to compare what they built. Reads all of them."""
        return content_key({"data": self.key}, *self.arrays.values())

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`: `[seq_length + 1]` tokens, int64, of which `length` are real."""
        tokens = np.zeros(self.capacity, dtype=np.int64)
        labels = np.full(self.capacity, IGNORE, dtype=np.int64) if self.labels is not None else None
        starts, at = [], 0
        for document, offset, length in self._checked(index):
            tokens[at : at + length] = self.data.get(document, offset, length)
            if self.labels is not None and labels is not None:
                labels[at : at + length] = self.labels.get(document, offset, length)
            starts.append(at)
            at += length
        return Sample(tokens, np.asarray(starts, dtype=np.int64), labels, at)

    def locate(self, index: int) -> Provenance:
        """The documents of sample `index`."""
        return Provenance((self.data.prefix,), index, tuple(Piece(*piece) for piece in self._checked(index)))

    def may_hold(self, wanted: Wanted) -> np.ndarray:
        """Samples that may hold some documents."""
        items = wanted.get(str(self.data.prefix))
        if items is None:
            return NONE
        found = self.holding(items)
        return found[found < self.samples]

    def _checked(self, index: int) -> list[tuple[int, int, int]]:
        if not 0 <= index < self.samples:
            raise IndexError(f"{self.data.prefix}: sample {index} of {self.samples}")
        return self.pieces(index)

    def _wholes(self, documents: np.ndarray) -> list[tuple[int, int, int]]:
        """Documents from their first token on, as many tokens as fit."""
        lengths = np.minimum(self.data.sizes[documents], self.capacity)
        return [(d, 0, length) for d, length in zip(documents.tolist(), lengths.tolist(), strict=True)]

    @abstractmethod
    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """(document, offset, length) of what is in sample `index`."""

    @abstractmethod
    def holding(self, items: range) -> np.ndarray:
        """The samples that may hold one of some items, ascending, also such as are beyond the end."""


def shuffled_segments(segments: Sequence[Segment], first: np.random.RandomState) -> np.ndarray:
    """Rows in reading order: each segment's own, counted through, shuffled; the first segment's with `first`.

    int64 `[samples]`, as GPT-NeoX shuffles them.
    """
    out, before = np.arange(sum(segment.samples for segment in segments), dtype=np.int64), 0
    for number, segment in enumerate(segments):
        rng = first if number == 0 else np.random.RandomState(segment.seed)
        shuffle(rng, out[before : before + segment.samples])
        before += segment.samples
    return out
