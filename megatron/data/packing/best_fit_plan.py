"""Best fit decreasing on a histogram: which lengths share a row, found without looking at single documents.

Best fit decreasing takes pieces from the longest to the shortest and puts each into the row with the least room left
that still holds it, or into a new row. Rows with equal room are interchangeable, and so are pieces of equal length. So
the whole epoch is packed in groups: a group of rows that were filled alike is filled on together. The work depends on
how many different lengths there are and not on how many documents, and every epoch has the same number of rows
whichever documents meet in one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Patterns:
    """Rows filled alike. Pattern g makes `counts[g]` rows; for each k in `[paths[g], paths[g + 1])` its rows hold
    `copies[k]` pieces of `sizes[k]` tokens, longest first.

    Attributes:
        counts: int64 `[patterns]`, all positive.
        paths: int64 `[patterns + 1]`.
        sizes, copies: int32.
    """

    counts: np.ndarray
    paths: np.ndarray
    sizes: np.ndarray
    copies: np.ndarray

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    def row_starts(self) -> np.ndarray:
        """Where each row begins among the pieces of all rows: int64 `[rows + 1]`."""
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.copies, dtype=np.int64)])
        widths = np.repeat(sums[self.paths[1:]] - sums[self.paths[:-1]], self.counts)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])


def best_fit_patterns(histogram: np.ndarray, capacity: int) -> Patterns:
    """Best fit decreasing of `histogram[n]` pieces of n tokens (n from 1 to `capacity`) into rows of `capacity`."""
    groups = _Groups(capacity)
    for size in np.flatnonzero(histogram)[::-1].tolist():
        if size > 0:
            groups.place(size, int(histogram[size]))
    return groups.patterns()


class _Groups:
    """Groups of rows filled alike: group g holds what its parent holds and `copies[g]` pieces of `sizes[g]` more."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.parents: list[int] = []
        self.sizes: list[int] = []
        self.copies: list[int] = []
        self.counts: list[int] = []
        self.by_room: dict[int, list[int]] = {}  # room left in a row -> groups
        self.rooms: list[int] = []  # the keys of by_room, ascending

    def place(self, size: int, pieces: int) -> None:
        """Put `pieces` pieces of `size` tokens into the rows."""
        while pieces:
            at = bisect_left(self.rooms, size)
            if at == len(self.rooms):
                self._open(size, pieces)
                return
            room = self.rooms[at]
            stack = self.by_room[room]
            group = stack[-1]
            # The tightest row stays the tightest while it is filled, so it takes what it can before the next.
            many = min(room // size, pieces)
            rows = min(self.counts[group], pieces // many)
            self.counts[group] -= rows
            if self.counts[group] == 0:
                stack.pop()
                if not stack:
                    del self.by_room[room]
                    del self.rooms[at]
            self._add(group, size, many, rows, room - many * size)
            pieces -= many * rows

    def _open(self, size: int, pieces: int) -> None:
        many = self.capacity // size
        rows, rest = divmod(pieces, many)
        if rows:
            self._add(-1, size, many, rows, self.capacity - many * size)
        if rest:
            self._add(-1, size, rest, 1, self.capacity - rest * size)

    def _add(self, parent: int, size: int, copies: int, rows: int, room: int) -> None:
        self.parents.append(parent)
        self.sizes.append(size)
        self.copies.append(copies)
        self.counts.append(rows)
        if room == 0:
            return
        if room not in self.by_room:
            self.by_room[room] = []
            insort(self.rooms, room)
        self.by_room[room].append(len(self.parents) - 1)

    def patterns(self) -> Patterns:
        counts: list[int] = []
        paths: list[int] = [0]
        nodes: list[int] = []
        for group, rows in enumerate(self.counts):
            if rows == 0:
                continue
            path = []
            while group >= 0:
                path.append(group)
                group = self.parents[group]
            nodes.extend(reversed(path))
            counts.append(rows)
            paths.append(len(nodes))
        return Patterns(
            np.asarray(counts, dtype=np.int64),
            np.asarray(paths, dtype=np.int64),
            np.asarray([self.sizes[node] for node in nodes], dtype=np.int32),
            np.asarray([self.copies[node] for node in nodes], dtype=np.int32),
        )
