"""What the packings of whole documents share: a sample is a row of documents, and padding where none fits any more.

Rows hold at most seq_length + 1 tokens; see `Sample` for what is trained in them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from megatron.data.index_builders.shuffle import shuffle
from megatron.data.packing import Packing, Segment, count_samples
from megatron.data.packing.samples import PackedSamples
from megatron.data.packing.usable import CHUNK_PIECES, LeftOut, Pieces, drop_silent, whole_pieces
from megatron.data.tokens.cache import Arrays, content_key
from megatron.errors import UserError


class WholeDocuments(Packing):
    """Which documents a packing uses, the keys of its cache entries, and its segments."""

    kind: ClassVar[str]  # the name in YAML, part of every cache key
    entry: ClassVar[str]  # in the names of its cache entries
    version: ClassVar[int] = 1  # part of every cache key: raise it when the arrays change
    samples_type: ClassVar[type[PackedSamples]]

    @abstractmethod
    def build_index(self, segments: Sequence[Segment]) -> Arrays:
        """The index arrays of some segments."""

    def _cut(self, sizes: np.ndarray, first: int) -> tuple[Pieces, LeftOut]:
        """The pieces of documents of these sizes `[sides, documents]`, numbered from `first`, without regard to
        labels."""
        return whole_pieces(sizes, first, self.capacity, self.allow_chopped, self.rows)

    def _sizes_of(self, first: int, end: int) -> np.ndarray:
        """Tokens of each text of documents `[first, end)` of the range: int32 `[sides, documents]`."""
        start, sides = self.documents[0], self.data.sides
        sizes = [side.sizes[start + first : start + end] for side in sides]
        return sizes[0][None] if len(sides) == 1 else np.stack(sizes)

    @cached_property
    def pieces(self) -> Pieces:
        """What is put into rows: arrays over all documents, needed to build an index, and when labels decide."""
        pieces, _ = self._cut(self._sizes_of(0, len(self.sizes)), self.documents[0])
        return drop_silent(pieces, self.labels, self.cache, self.name)

    @cached_property
    def _survey(self) -> tuple[np.ndarray, LeftOut]:
        """The next two. Reads the sizes in stretches, so that a start without building takes no memory."""
        counts, left_out = np.zeros(self.room + 1, np.int64), LeftOut()
        for start in range(0, count := len(self.sizes), CHUNK_PIECES):
            pieces, here = self._cut(self._sizes_of(start, min(start + CHUNK_PIECES, count)), 0)
            counts += np.bincount(pieces.lengths, minlength=len(counts))
            left_out = left_out.add(here)
        fitting = int(counts[1:].sum())
        if self.labels is not None:
            lengths, counts = self.pieces.lengths, np.zeros_like(counts)
            for start in range(0, len(lengths), CHUNK_PIECES):
                counts += np.bincount(lengths[start : start + CHUNK_PIECES], minlength=len(counts))
        counts[:2] = 0
        return counts, replace(left_out, silent=fitting - int(counts.sum()))

    @property
    def room(self) -> int:
        """Tokens of a sample with all its rows."""
        return self.rows * self.capacity

    @property
    def histogram(self) -> np.ndarray:
        """int64 `[room + 1]`: how many pieces of each length are used."""
        return self._survey[0]

    @property
    def left_out(self) -> LeftOut:
        return self._survey[1]

    @property
    def tokens(self) -> int:
        """Tokens that are read in a pass."""
        return int(self.histogram @ np.arange(self.room + 1))

    @property
    def padding(self) -> float:
        """Share of padding in the samples of a pass, 0 to 1."""
        room = self.samples_per_epoch() * self.room
        return max(0.0, 1.0 - self.tokens / room) if room else 0.0

    def _free(self) -> None:
        """Drop the arrays over all documents once the index is built; small results are kept."""
        if "pieces" in self.__dict__:
            _ = self.key, self._survey
            del self.__dict__["pieces"]

    @cached_property
    def key(self) -> str:
        described = {"kind": self.kind, "version": self.version, "documents": list(self.documents)}
        described |= {"seq_length": self.seq_length, "allow_chopped": self.allow_chopped}
        if self.compares:
            described |= {"compares": True}
        decided = [np.packbits(self.pieces.lengths > 0)] if self.labels is not None else []
        first, end = self.documents
        return content_key(described, *(side.sizes[first:end] for side in self.data.sides), *decided)

    def notes(self) -> list[str]:
        out, lines = self.left_out, []
        if out.too_long:
            lines.append(
                f"{out.too_long} {self.counted} of more than {self.limit} are left out (allow_chopped: true cuts them)"
            )
        if out.cut:
            lines.append(self._cut_note())
        if out.silent:
            why = "less than two tokens, or all labels -100" if self.labels is not None else "less than two tokens"
            where = "" if len(self.data.sides) == 1 else " in one of the texts"
            lines.append(f"{out.silent} {self.counted} train nothing ({why}{where}) and are left out")
        if rows := self.samples_per_epoch():
            lines.append(f"an epoch is {rows} sample{'s' * (rows != 1)}, {self.padding:.2%} of them padding")
        return lines

    @property
    def counted(self) -> str:
        """What rows are made of, in words."""
        return "documents" if len(self.data.sides) == 1 else "pairs"

    @property
    def limit(self) -> str:
        """What a row holds, in words."""
        each = "" if self.rows == 1 else " in each text"
        return f"{self.capacity} tokens (seq_length + 1){each}"

    def _cut_note(self) -> str:
        out = self.left_out
        return f"{out.cut} {self.counted} are cut to {self.limit}, which loses {out.cut_tokens} tokens"

    def check_usable(self, what: str) -> None:
        if not self.histogram.any():
            why = "; ".join(self.notes()) or "there are none"
            raise UserError(f"{what}: no document can be trained on with pack_impl {self.kind}: {why}.")

    def segment(self, samples: int, seed: int) -> Segment:
        return Segment(0, samples, seed)

    def dataset(self, segments: Sequence[Segment]) -> PackedSamples:
        described = [[segment.epochs, segment.samples, segment.seed] for segment in segments]
        key = content_key({"data": self.key, "segments": described})
        arrays = self.cache.arrays(f"{self.name}-{self.entry}", key, lambda: self.build_index(segments))
        self._free()
        return self.samples_type(self, count_samples(segments), [arrays])


def shuffle_rows(segments: Sequence[Segment], first: np.random.RandomState) -> np.ndarray:
    """Numbers of rows in reading order: those of each segment shuffled by itself, the first segment's by `first`.

    int64 `[samples]`, as GPT-NeoX shuffles them.
    """
    out, before = np.arange(count_samples(segments), dtype=np.int64), 0
    for number, segment in enumerate(segments):
        rng = first if number == 0 else np.random.RandomState(segment.seed)
        shuffle(rng, out[before : before + segment.samples])
        before += segment.samples
    return out
