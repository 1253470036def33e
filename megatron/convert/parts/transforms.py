"""How one of our parameters becomes one or more Hugging Face tensors, and back.

"Ours" is the full logical tensor in memory row order (fused QKV [Q | K | V], gated MLP [up ; gate]).
Legend: n heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Transform(Protocol):
    """`load(export(x))` is x, bit for bit."""

    def export(self, full: Tensor) -> list[Tensor]: ...
    def load(self, parts: Sequence[Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class Copy:
    """The same tensor."""

    def export(self, full: Tensor) -> list[Tensor]:
        return [full]

    def load(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]


@dataclass(frozen=True)
class Split:
    """Rows in blocks of the given sizes, one tensor each: q, k, v or up, gate."""

    sizes: tuple[int, ...]

    def export(self, full: Tensor) -> list[Tensor]:
        return list(full.split(self.sizes))

    def load(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))


@dataclass(frozen=True)
class PerHead:
    """Fused QKV [Q | K | V] ↔ head by head q, k, v (as many key/value heads as query heads)."""

    heads: int

    def export(self, full: Tensor) -> list[Tensor]:
        return [full.reshape(3, self.heads, -1, *full.shape[1:]).transpose(0, 1).reshape(full.shape)]

    def load(self, parts: Sequence[Tensor]) -> Tensor:
        part = parts[0]
        return part.reshape(self.heads, 3, -1, *part.shape[1:]).transpose(0, 1).reshape(part.shape)


@dataclass(frozen=True)
class PerGroup:
    """Fused QKV [Q | K | V] ↔ key/value head by head: its queries, its k, its v (Falcon 40B)."""

    heads: int
    kv_heads: int

    def export(self, full: Tensor) -> list[Tensor]:
        d = full.shape[0] // (self.heads + 2 * self.kv_heads)
        q, k, v = full.split((self.heads * d, self.kv_heads * d, self.kv_heads * d))
        groups = [part.reshape(self.kv_heads, -1, *full.shape[1:]) for part in (q, k, v)]
        return [torch.cat(groups, dim=1).reshape(full.shape)]

    def load(self, parts: Sequence[Tensor]) -> Tensor:
        part = parts[0]
        d = part.shape[0] // (self.heads + 2 * self.kv_heads)
        groups = part.reshape(self.kv_heads, -1, *part.shape[1:])
        split = groups.split((self.heads // self.kv_heads * d, d, d), dim=1)
        return torch.cat([piece.reshape(-1, *part.shape[1:]) for piece in split])


@dataclass(frozen=True)
class Transpose:
    """A matrix stored as [in, out] (GPT-2's Conv1D)."""

    def export(self, full: Tensor) -> list[Tensor]:
        return [full.T.contiguous()]

    def load(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].T.contiguous()


@dataclass(frozen=True)
class SwapHalves:
    """Gated rows [up ; gate] ↔ [gate ; up]; `dim`: that of the rows."""

    dim: int = 0

    def export(self, full: Tensor) -> list[Tensor]:
        return [torch.cat(full.chunk(2, self.dim)[::-1], self.dim)]

    def load(self, parts: Sequence[Tensor]) -> Tensor:
        return self.export(parts[0])[0]


@dataclass(frozen=True)
class PerExpert:
    """All experts in one tensor [E, rows, ...] ↔ for each in turn, its rows in blocks of the given sizes.

    Reads one matrix at a time.
    """

    experts: int
    sizes: tuple[int, ...]

    def export(self, full: Tensor) -> list[Tensor]:
        return [block for expert in full for block in expert.split(self.sizes)]

    def load(self, parts: Sequence[Tensor]) -> Tensor:
        first = parts[0]
        full = first.new_empty((self.experts, sum(self.sizes), *first.shape[1:]))
        places = self.export(full)
        self._put(places, 0, first)
        del first
        for number in range(1, len(places)):
            self._put(places, number, parts[number])
        return full

    def _put(self, places: list[Tensor], number: int, part: Tensor) -> None:
        if part.shape != places[number].shape:
            raise ValueError(
                f"expert {number // len(self.sizes)} has a matrix {list(part.shape)}, not {list(places[number].shape)}"
            )
        places[number].copy_(part)


@dataclass(frozen=True)
class Duplicate:
    """One tensor that the other side has `count` times (a norm that two branches share)."""

    count: int

    def export(self, full: Tensor) -> list[Tensor]:
        return [full] * self.count

    def load(self, parts: Sequence[Tensor]) -> Tensor:
        if any(not torch.equal(part, parts[0]) for part in parts):
            raise ValueError("tensors that must be one are not equal")
        return parts[0]
