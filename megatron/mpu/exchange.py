"""Rows of tokens travel to the ranks that hold their experts, and back: all-to-all over the group "expert".

Legend: n rows on this rank, m rows for this rank's experts, h features; E/tp experts of this rank's tensor-parallel
part, E/(tp·ep) of them on each rank of the group "expert" (`initial_weights.first_expert`).

Every rank of the group must make the same calls in the same order, also one that has nothing to send or to compute:
the backward pass and recomputation exchange as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.mpu.state import ParallelState

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Exchange:
    """The way of one batch of rows to their experts and back.

    * `counts`: [E/(tp·ep)] int64: rows for each expert that this rank holds, from all ranks of the group.
    * `send`, `receive`: rows to and from each rank of the group.
    * `by_expert`: [m] positions of the received rows, which come rank by rank, such that an expert's rows are
      neighbours; `by_rank` undoes it. None when nothing travels.
    """

    state: ParallelState
    counts: Tensor
    send: list[int]
    receive: list[int]
    by_expert: Tensor | None = None
    by_rank: Tensor | None = None

    @classmethod
    def plan(cls, counts: Tensor, state: ParallelState) -> Exchange:
        """From the rows that this rank has for each expert of its tensor-parallel part, `counts` [E/tp] int64.

        Waits for the device, once: the sizes must be known to the host. Collective over the group "expert".
        """
        if state.ep_size == 1:
            return cls(state, counts, [], [])
        mine = counts.view(state.ep_size, -1)  # [rank that holds them, expert]
        # Row r: what rank r sends to each of this rank's experts.
        theirs = _all_to_all(mine, [1] * state.ep_size, [1] * state.ep_size, state)
        send, receive = torch.stack([mine.sum(1), theirs.sum(1)]).tolist()
        # What a rank sent for an expert arrives in one piece and stays one: only the pieces change places.
        places = torch.arange(sum(receive), device=counts.device)
        moved = _starts(theirs.t()).t() - _starts(theirs)
        by_rank = places + moved.flatten().repeat_interleave(theirs.flatten(), output_size=len(places))
        by_expert = places - moved.t().flatten().repeat_interleave(theirs.t().flatten(), output_size=len(places))
        return cls(state, theirs.sum(0), send, receive, by_expert, by_rank)

    def to_experts(self, rows: Tensor) -> Tensor:
        """[n, h] sorted by expert -> [m, h], the rows of all ranks for this rank's experts, sorted by expert."""
        if self.by_expert is None:
            return rows
        arrived = _Exchanged.apply(rows, self.send, self.receive, self.state)
        return arrived.index_select(0, self.by_expert)

    def from_experts(self, rows: Tensor) -> Tensor:
        """[m, h] in the order of `to_experts` -> [n, h], back on the ranks and in the order that they came from."""
        if self.by_rank is None:
            return rows
        return _Exchanged.apply(rows.index_select(0, self.by_rank), self.receive, self.send, self.state)


def _starts(sizes: Tensor) -> Tensor:
    """Where each piece begins when all lie one after the other, row by row: the shape of `sizes`."""
    flat = sizes.flatten()
    return (flat.cumsum(0) - flat).view(sizes.shape)


class _Exchanged(torch.autograd.Function):
    """Rows to other ranks; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], state: ParallelState) -> Tensor:
        ctx.back = (receive, send, state)
        return _all_to_all(x, send, receive, state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, *ctx.back), None, None, None


def _all_to_all(x: Tensor, send: list[int], receive: list[int], state: ParallelState) -> Tensor:
    group = state.group("expert")
    if group is None:
        raise ValueError("the experts are on one rank, so there is nobody to exchange rows with")
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), receive, send, group.group_name))
