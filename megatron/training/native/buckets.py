"""Flat memory for weights, sums of gradients and masters, and which part of each parameter this rank owns.

Legend: n elements of a bucket, r ranks that share it.

| tensor    | type            | elements |
|-----------|-----------------|----------|
| `weights` | the model's     | n        |
| `sums`    | fp32            | n        |
| `masters` | fp32            | n / r, in fp32 models this rank's part of `weights` itself |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.mpu.sharding import spec_of
from megatron.mpu.state import ParallelState
from megatron.optim.matrices import Held, shares_of
from megatron.training.native.fixed_point import from_fixed
from megatron.training.partition_comm import most_elements, own_part, start_all_gather, start_reduce_scatter

ALIGNED = 64  # elements: products of matrices want their operands at multiples of 128 bytes


@dataclass
class Slot:
    """A parameter in its bucket.

    Attributes:
        start: its first element in the bucket.
        owned: which of its flattened elements this rank owns.
        master: these, fp32: 1-D, but in the parameter's shape where nothing is divided and autograd keeps the sum.
            An optimizer that looks at shapes (SM3) must not do another thing to the parameters at borders of parts.
        total: the fp32 sum of the whole parameter's gradients, in its shape; None where autograd keeps it (`.grad`).
        gradient: the part of `total` that belongs to `master`, in its shape.
    """

    parameter: Parameter
    start: int
    owned: range
    master: Tensor
    total: Tensor | None = None
    gradient: Tensor | None = None


class Bucket:
    """Parameters of one type, shared by one group of ranks, in one piece of memory.

    Args:
        parameters: they become views of this bucket's memory; their values stay.
        group: the ranks that share it; None when this rank is alone.
        dtype: of the weights.
        device: of everything.
        fixed_point: sums are int64 (`fixed_point`); they are read with `convert`.
    """

    def __init__(
        self,
        parameters: list[Parameter],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
        fixed_point: bool = False,
    ) -> None:
        self.group = group
        self.ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
        starts, end = [], 0
        for p in parameters:
            starts.append(end)
            end = _round_up(end + p.numel(), ALIGNED)
        size = _round_up(end, ALIGNED * self.ranks)
        self.weights = torch.zeros(size, dtype=dtype, device=device)
        for p, start in zip(parameters, starts, strict=True):
            place = self.weights[start : start + p.numel()].view(p.shape)
            place.copy_(p.detach())
            p.data = place
        own_weights = own_part(self.weights, group)
        self.masters = own_weights if dtype == torch.float32 else own_weights.float()
        # In fp32 and alone, what autograd leaves in `.grad` is the sum.
        keeps_sums = group is not None or dtype != torch.float32 or fixed_point
        kind = torch.int64 if fixed_point else torch.float32
        self.sums = torch.zeros(size, dtype=kind, device=device) if keeps_sums else None
        self._converted = torch.zeros(size // self.ranks, device=device) if fixed_point else None
        own = range(rank * size // self.ranks, (rank + 1) * size // self.ranks)
        self.slots = [self._slot(p, start, own) for p, start in zip(parameters, starts, strict=True)]
        self.totals = [(slot.parameter, slot.total) for slot in self.slots if slot.total is not None]
        self._work: dist.Work | None = None

    def _slot(self, p: Parameter, start: int, own: range) -> Slot:
        """`own`: the elements of the bucket that this rank owns."""
        first, end = max(start, own.start), min(start + p.numel(), own.stop)
        owned = range(first - start, max(first, end) - start) if first < end else range(0)
        shape = p.shape if self.sums is None else (len(owned),)
        offset = first - own.start if owned else 0
        slot = Slot(p, start, owned, self.masters[offset : offset + len(owned)].view(shape))
        if self.sums is not None:
            slot.total = self.sums[start : start + p.numel()].view(p.shape)
            slot.gradient = slot.total.view(-1)[owned.start : owned.stop].view(shape)
        if self._converted is not None:
            slot.gradient = self._converted[offset : offset + len(owned)]
        return slot

    def held(self, slot: Slot) -> Held:
        """A slot for optimizers of whole matrices."""
        rank = dist.get_rank(self.group) if self.group is not None else 0
        shares = shares_of(slot.start, slot.parameter.numel(), self.weights.numel() // self.ranks, self.ranks)
        return Held(slot.parameter, 0, shares, rank, self.group)

    def start_reduction(self) -> None:
        """Begin to add the sums up into their owners' parts."""
        if self.group is not None and self.sums is not None:
            self._work = start_reduce_scatter(self.sums, self.group)

    def convert(self) -> None:
        """Sums in fixed point, once they are reduced, as the gradients of the slots."""
        if self._converted is not None:
            assert self.sums is not None
            self._converted.copy_(from_fixed(own_part(self.sums, self.group)))

    def start_publishing(self) -> None:
        """Begin to bring every rank's weights up to date with the masters."""
        if self.masters.dtype != self.weights.dtype:
            own_part(self.weights, self.group).copy_(self.masters)
        if self.group is not None:
            self._work = start_all_gather(self.weights, self.group)

    def wait(self) -> None:
        """Until what was started is done. On an accelerator the device's stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def cut_into_buckets(
    parameters: Iterable[Parameter],
    state: ParallelState,
    dtype: torch.dtype,
    most: int | None = None,
    fixed_point: bool = False,
) -> list[Bucket]:
    """Buckets of `parameters` in the order in which backward passes complete them: the last layer's first.

    Args:
        parameters: in the model's order.
        dtype: the model's; what is to be kept in fp32 is.
        most: elements of a bucket (`most_elements`).
        fixed_point: see `Bucket`.
    """
    full: list[tuple[list[Parameter], torch.dtype, bool]] = []
    open_: dict[tuple[torch.dtype, bool], list[Parameter]] = {}
    for p in reversed(list(parameters)):
        spec = spec_of(p)
        apart = spec.experts and state.ep_size > 1
        kind = (torch.float32 if spec.keep_fp32 else dtype, apart)
        ranks = state.dp_size // state.ep_size if apart else state.dp_size
        limit = most_elements(ranks, most)
        members = open_.pop(kind, [])  # and to the end: what got a parameter last is complete last
        if members and sum(member.numel() for member in members) + p.numel() > limit:
            full.append((members, *kind))
            members = []
        open_[kind] = [*members, p]
    full += [(members, *kind) for kind, members in open_.items()]
    return [
        Bucket(members, state.group("expert_data" if apart else "data"), kind, state.device, fixed_point)
        for members, kind, apart in full
    ]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
