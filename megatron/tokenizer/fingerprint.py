"""The fingerprint of a tokenizer: small enough for a manifest, able to decide "equal" and "contained".

It names the ids that exist (as ranges) and hashes their tokens in id order. A tokenizer that has at least those ids can
repeat the hash over exactly those ranges, so a base vocabulary is recognised inside its instruct extension (which adds
ids, also in gaps) without storing the vocabulary itself. It also has what the tokenizer puts around every text.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

HEAD = struct.Struct("<QQ")  # id, bytes of the token


@dataclass(frozen=True)
class Fingerprint:
    """Which ids a tokenizer has, and a hash of what they mean.

    `ranges` are half-open `(first, end)` id ranges in increasing order; `sha256` is the hex digest over
    `(id, token)` of all ids inside them. `start` and `end` are the ids that it puts by itself before and after every
    text, None where that is not known (chats, data and checkpoints of earlier versions); `==` does not compare them.
    """

    ranges: tuple[tuple[int, int], ...]
    sha256: str
    start: tuple[int, ...] | None = field(default=None, compare=False)
    end: tuple[int, ...] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, id_map: Mapping[int, str]) -> Fingerprint:
        """The fingerprint of a map from id to token."""
        gapless = id_map and min(id_map) == 0 and max(id_map) == len(id_map) - 1  # as nearly all are
        ranges = ((0, len(id_map)),) if gapless else _ranges(sorted(id_map))
        return cls(ranges, _digest(id_map, ranges))

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Fingerprint:
        """Read back what `to_dict` gave. Raises `KeyError`/`TypeError`/`ValueError` when it is something else."""
        ranges = tuple((int(first), int(end)) for first, end in stored["ranges"])
        added = {key: tuple(map(int, stored[key])) for key in ("start", "end") if stored.get(key) is not None}
        return cls(ranges, str(stored["sha256"]), **added)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form, for manifests and checkpoints."""
        added = {key: list(ids) for key, ids in (("start", self.start), ("end", self.end)) if ids is not None}
        return {"ranges": [list(pair) for pair in self.ranges], "sha256": self.sha256, **added}

    def without_added(self) -> Fingerprint:
        """The id map alone: of data around whose texts the tokenizer put nothing."""
        return replace(self, start=None, end=None)

    def adds_the_same(self, other: Fingerprint) -> bool:
        """Whether both put the same around a text, as far as that is known."""
        pairs = ((self.start, other.start), (self.end, other.end))
        return all(mine == its for mine, its in pairs if mine is not None and its is not None)

    def contained_in(self, id_map: Mapping[int, str]) -> bool:
        """Whether every id of this fingerprint is in `id_map` with the same token (so: equal or contained)."""
        have = all(i in id_map for first, end in self.ranges for i in range(first, end))
        return have and _digest(id_map, self.ranges) == self.sha256


def _ranges(ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    ranges: list[list[int]] = []
    for i in ids:
        if ranges and ranges[-1][1] == i:
            ranges[-1][1] = i + 1
        else:
            ranges.append([i, i + 1])
    return tuple((first, end) for first, end in ranges)


def _digest(id_map: Mapping[int, str], ranges: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for first, end in ranges:
        # Vocabularies may hold lone surrogates; lengths keep neighbouring tokens from running into each other.
        tokens = ((i, id_map[i].encode("utf-8", "surrogatepass")) for i in range(first, end))
        digest.update(b"".join([HEAD.pack(i, len(token)) + token for i, token in tokens]))
    return digest.hexdigest()
