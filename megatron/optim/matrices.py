"""Whole matrices for optimizers that look at them as such (Muon), whatever ranks have of them.

A tensor that an optimizer updates may be a parameter, or a flat piece of memory with parts of several. A matrix that is
cut over data-parallel ranks goes to its owner, the rank that has most of it, and comes back; one that is cut over
tensor-parallel ranks is gathered by each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.mpu.collectives import all_gather
from megatron.mpu.sharding import ParamSpec, shard, unshard
from megatron.mpu.state import ParallelState

WHOLE = "whole."
"""How names begin of what an optimizer keeps of a whole matrix, the same on every rank, and not of a rank's part."""


def is_matrix(spec: ParamSpec) -> bool:
    """Whether a parameter is a matrix that multiplies hidden states, or one of each expert."""
    return spec.kind == "matrix" and spec.padded is None and min(spec.shape[-2:]) > 1


@dataclass(frozen=True)
class Held:
    """A parameter in a tensor that an optimizer updates.

    Attributes:
        parameter: this rank's tensor-parallel part.
        offset: where in the flattened tensor its elements begin that this rank has.
        shares: which of its flattened elements each rank of `group` has, in order; disjoint, and all of it.
        rank: this one in `group`.
        group: None when this rank has all.
    """

    parameter: Parameter
    offset: int
    shares: tuple[range, ...]
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def mine(self) -> range:
        return self.shares[self.rank]

    @property
    def owner(self) -> int:
        """The rank of `group` that has most of it."""
        return max(range(len(self.shares)), key=lambda rank: len(self.shares[rank]))

    def peers(self) -> list[tuple[int, range]]:
        """(rank of the job, what it has) of the others that have a piece."""
        others = [(rank, share) for rank, share in enumerate(self.shares) if share and rank != self.rank]
        return [(dist.get_global_rank(self.group, rank), share) for rank, share in others]  # type: ignore[arg-type]


def hold(tensor: Tensor, held: Sequence[Held]) -> None:
    """Say what lies in a tensor that an optimizer updates; a parameter itself needs no saying."""
    tensor.held = list(held)  # type: ignore[attr-defined]


def held_in(tensor: Tensor) -> list[Held]:
    """What `hold` said."""
    known: list[Held] | None = getattr(tensor, "held", None)
    if known is None:
        return [Held(tensor, 0, (range(tensor.numel()),))]  # type: ignore[arg-type]
    return known


class WholeMatrices:
    """Functions of whole matrices on tensor-parallel parts of parameters.

    Args:
        every: the optimizer looks at every parameter as a whole, not at the hidden matrices alone.

    Attributes:
        parameters: all that are trained on this stage, of which a rank may have nothing.
    """

    def __init__(self, state: ParallelState, every: bool = False) -> None:
        self.state = state
        self.every = every
        self.parameters: list[Parameter] = []

    def apply(
        self, function: Callable[[Tensor], Tensor], local: Tensor, spec: ParamSpec, qkv: str = "matrices"
    ) -> Tensor:
        """This rank's part of what `function` makes of a parameter's matrices.

        Args:
            function: [..., m, n] -> the same shape, matrix by matrix.
            local: this rank's part. Parts of one parameter that only lie side by side (q, k and v; up and gate) are
                matrices of their own, and so is each expert's.
            qkv: what is a matrix of queries, keys and values: all heads together ("matrices"), those that share keys
                and values ("groups"), or each ("heads").
        """
        rank, ranks = self.state.tp_rank, self.state.tp_size
        if spec.heads and qkv != "matrices":  # which no tensor-parallel rank has a part of
            counts = spec.heads if qkv == "heads" else (min(spec.heads),) * len(spec.heads)
            own = local.split(spec.local_blocks(ranks))
            stacked = [part.unflatten(0, (count // ranks, -1)) for part, count in zip(own, counts, strict=True)]
            return torch.cat([function(part).flatten(0, 1) for part in stacked])
        cut = spec.split_dim is not None and not spec.experts and ranks > 1
        full = unshard(all_gather(local, self.state).chunk(ranks), spec) if cut else local
        dim, sizes = (1, spec.expert_blocks) if spec.experts else (spec.split_dim or 0, spec.blocks)
        parts = full.split(sizes, dim) if sizes else [full]
        made = torch.cat([function(part) for part in parts], dim)
        return shard(made, spec, rank, ranks) if cut else made


Cut = list[tuple[Held, Tensor]]


def gather_to_owners(pieces: Cut) -> Cut:
    """Of the matrices that this rank owns: all elements, flat. Of the same matrices in the same order on every rank
    that has a piece of one: collective over these."""
    operations, owned = [], []
    for held, piece in pieces:
        if held.rank == held.owner:
            whole = piece.new_empty(held.parameter.numel())
            whole[held.mine.start : held.mine.stop] = piece
            owned.append((held, whole))
            operations += [
                dist.P2POp(dist.irecv, whole[share.start : share.stop], peer, held.group)
                for peer, share in held.peers()
            ]
        else:
            operations.append(dist.P2POp(dist.isend, piece.contiguous(), _owner(held), held.group))
    _exchange(operations)
    return owned


def return_from_owners(pieces: Cut, owned: Cut) -> Cut:
    """The way back: this rank's elements of each of `pieces`, whose memory they may take."""
    whole = {id(held): made for held, made in owned}
    operations, found = [], []
    for held, piece in pieces:
        if held.rank == held.owner:
            made = whole[id(held)].view(-1)
            found.append((held, made[held.mine.start : held.mine.stop]))
            operations += [
                dist.P2POp(dist.isend, made[share.start : share.stop], peer, held.group) for peer, share in held.peers()
            ]
        else:
            arriving = torch.empty_like(piece)
            found.append((held, arriving))
            operations.append(dist.P2POp(dist.irecv, arriving, _owner(held), held.group))
    _exchange(operations)
    return found


def _owner(held: Held) -> int:
    return dist.get_global_rank(held.group, held.owner)  # type: ignore[arg-type]


def _exchange(operations: Iterable[dist.P2POp]) -> None:
    by_group: dict[dist.ProcessGroup | None, list[dist.P2POp]] = {}
    for operation in operations:
        by_group.setdefault(operation.group, []).append(operation)
    works = [work for some in by_group.values() for work in dist.batch_isend_irecv(some)]
    for work in works:
        work.wait()


def shares_of(start: int, count: int, part: int, ranks: int) -> tuple[range, ...]:
    """Which of `count` elements, from `start` on in flat memory of which each of `ranks` has `part`, each one has."""
    found = []
    for rank in range(ranks):
        first, end = max(start, rank * part), min(start + count, (rank + 1) * part)
        found.append(range(first - start, end - start) if first < end else range(0))
    return tuple(found)
