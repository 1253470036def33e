"""Bringing tokens to their experts and what they compute back: the one place that knows on which rank an expert is.

Legend: t tokens, k experts per token, h hidden, r rows of this rank's experts, E experts of the layer.

Every tensor-parallel rank sees all tokens of its micro-batch, so without expert parallelism nothing is sent: a rank
takes the assignments to its own experts and returns a partial sum, which the layer's last reduction completes.

Under expert parallelism the ranks of the group "expert" divide a tensor-parallel rank's experts, and each has other
tokens: the rows of their experts travel to them, and the outputs back (mpu/exchange).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from megatron.layers.moe.grouped_linear import Groups
from megatron.layers.moe.permute import Order, combine_rows, gather_rows, order_by
from megatron.mpu.exchange import Exchange
from megatron.mpu.state import ParallelState


class Dispatched(Protocol):
    """Tokens that have come to their experts.

    * `rows` [r, h]: of this rank's experts, in their order; may continue behind the last group (`Groups`).
    * `groups`: how many rows each of this rank's experts has.
    """

    @property
    def rows(self) -> Tensor: ...
    @property
    def groups(self) -> Groups: ...

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """What the experts made of `rows` [r, h] and the weights [t, k] of the assignments -> Σ weight · output [t, h].

        A partial sum: over the tensor-parallel ranks it is whole.
        """
        ...


class Dispatch(Protocol):
    """How tokens come to experts."""

    def __call__(self, x: Tensor, experts: Tensor, keep: Tensor | None) -> Dispatched:
        """x [t, h] and the experts [t, k] int64 of each token. `keep` bool [t, k]: which assignments are not dropped
        (None: all are kept)."""
        ...


@dataclass(frozen=True)
class LocalRows:
    """The rows of experts that are all on this rank."""

    rows: Tensor
    order: Order

    @property
    def groups(self) -> Groups:
        return self.order.groups

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        return combine_rows(outputs, weights, self.order)


@dataclass(frozen=True)
class LocalDispatch:
    """Nothing is sent: this rank's experts are `first` .. `first + count - 1` of `total`."""

    first: int
    count: int
    total: int

    def __call__(self, x: Tensor, experts: Tensor, keep: Tensor | None) -> LocalRows:
        bucket, complete = experts - self.first, self.count == self.total and keep is None
        if not complete:
            here = (bucket >= 0) & (bucket < self.count)
            bucket = bucket.masked_fill(~(here if keep is None else here & keep), self.count)
        order = order_by(bucket, self.count, complete=complete)
        return LocalRows(gather_rows(x, order), order)


@dataclass(frozen=True)
class ExchangedRows:
    """The rows of all ranks of the group "expert" for this rank's experts."""

    rows: Tensor
    groups: Groups
    own: LocalRows
    exchange: Exchange

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        back = self.exchange.from_experts(outputs)
        # On a GPU the rows of this rank's tokens continue behind the last group (`Groups`); nobody reads those.
        return self.own.combine(F.pad(back, (0, 0, 0, len(self.own.rows) - len(back))), weights)


@dataclass(frozen=True)
class ExchangedDispatch:
    """To the experts of this rank's tensor-parallel part (`part`), whoever has them. Collective over "expert"."""

    part: LocalDispatch
    state: ParallelState

    def __call__(self, x: Tensor, experts: Tensor, keep: Tensor | None) -> ExchangedRows:
        own = self.part(x, experts, keep)
        exchange = Exchange.plan(own.groups.sizes, self.state)
        rows = exchange.to_experts(own.rows[: sum(exchange.send)])
        return ExchangedRows(rows, Groups(exchange.counts), own, exchange)


def build_dispatch(experts: int, state: ParallelState) -> Dispatch:
    """For a layer of `experts` experts: whole ones on each tensor-parallel rank, in order, and of these on each
    expert-parallel rank."""
    count = experts // state.tp_size
    part = LocalDispatch(state.tp_rank * count, count, experts)
    return part if state.ep_size == 1 else ExchangedDispatch(part, state)
