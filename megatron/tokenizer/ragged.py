"""Rows of token ids of different lengths, back to back: what a batch of texts becomes without Python integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np


@dataclass(frozen=True)
class Ragged:
    """`ids [sum of lengths]`, unsigned 32-bit unless given otherwise, and `lengths [rows]` int64."""

    ids: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """From lists of ids."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return cls(np.fromiter(chain.from_iterable(rows), np.uint32, int(lengths.sum())), lengths)

    @classmethod
    def join(cls, rows: Sequence[np.ndarray]) -> Ragged:
        """From arrays of ids."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return cls(np.concatenate(rows) if rows else np.empty(0, np.uint32), lengths)

    def rows(self) -> list[np.ndarray]:
        """One view per row."""
        ends = np.cumsum(self.lengths)
        return [self.ids[end - n : end] for end, n in zip(ends.tolist(), self.lengths.tolist())]

    def frame(self, head: Sequence[int], tail: Sequence[int]) -> Ragged:
        """Every row with `head` before and `tail` after it. The type stays."""
        if not head and not tail:
            return self
        lengths = self.lengths + len(head) + len(tail)
        ends = np.cumsum(lengths)
        framed = np.empty(len(self.ids) + len(lengths) * (len(head) + len(tail)), self.ids.dtype)
        own = np.ones(len(framed), bool)
        places = [ends - lengths + i for i in range(len(head))] + [ends - len(tail) + i for i in range(len(tail))]
        for at, token in zip(places, (*head, *tail)):
            framed[at] = token
            own[at] = False
        framed[own] = self.ids
        return Ragged(framed, lengths)

    def single(self, head: Sequence[int], tail: Sequence[int]) -> Ragged:
        """Every row that has `head` twice at its start, or `tail` twice at its end, with only one of them."""
        ends = np.cumsum(self.lengths)
        begins, drop = ends - self.lengths, np.zeros(len(self.ids), bool)
        lengths = self.lengths.copy()
        for own, other, first in ((head, tail, begins), (tail, head, ends - 2 * len(tail))):
            rows = np.flatnonzero(lengths >= 2 * len(own) + len(other)) if own else np.empty(0, np.int64)
            for i, token in enumerate((*own, *own)):
                rows = rows[self.ids[first[rows] + i] == token]
            lengths[rows] -= len(own)
            for i in range(len(own)):
                drop[first[rows] + i] = True
        return Ragged(self.ids[~drop], lengths) if drop.any() else self
