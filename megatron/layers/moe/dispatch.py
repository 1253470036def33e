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
from megatron.layers.moe.permute import Order, order_by
from megatron.mpu.exchange import Exchange
from megatron.mpu.state import ParallelState


class Route(Protocol):
    """The way of one batch of tokens to their experts and back.

    * `order`: of the rows [r'] that this rank's tokens become.
    * `groups`: how many rows [r] each of this rank's experts gets. They may continue behind the last group (`Groups`).
    """

    @property
    def order(self) -> Order: ...
    @property
    def groups(self) -> Groups: ...

    def to_experts(self, rows: Tensor) -> Tensor:
        """Rows of this rank's tokens [r', h] in their order -> those of this rank's experts [r, h]."""
        ...

    def from_experts(self, outputs: Tensor) -> Tensor:
        """What the experts made of them [r, h] -> what became of this rank's tokens [r', h], in the order again.

        Over the tensor-parallel ranks these are all of a token's assignments.
        """
        ...


class Dispatch(Protocol):
    """How tokens come to experts."""

    def __call__(self, experts: Tensor, keep: Tensor | None) -> Route:
        """`experts` [t, k] int64 of each token. `keep` bool [t, k]: which assignments are not dropped (None: all are
        kept)."""
        ...


@dataclass(frozen=True)
class LocalRoute:
    """To experts that are all on this rank."""

    order: Order

    @property
    def groups(self) -> Groups:
        return self.order.groups

    def to_experts(self, rows: Tensor) -> Tensor:
        return rows

    def from_experts(self, outputs: Tensor) -> Tensor:
        return outputs


@dataclass(frozen=True)
class LocalDispatch:
    """Nothing is sent: this rank's experts are `first` .. `first + count - 1` of `total`."""

    first: int
    count: int
    total: int

    def __call__(self, experts: Tensor, keep: Tensor | None) -> LocalRoute:
        bucket, complete = experts - self.first, self.count == self.total and keep is None
        if not complete:
            here = (bucket >= 0) & (bucket < self.count)
            bucket = bucket.masked_fill(~(here if keep is None else here & keep), self.count)
        return LocalRoute(order_by(bucket, self.count, complete=complete))


@dataclass(frozen=True)
class ExchangedRoute:
    """To experts on all ranks of the group "expert"."""

    order: Order
    groups: Groups
    exchange: Exchange

    def to_experts(self, rows: Tensor) -> Tensor:
        return self.exchange.to_experts(rows[: sum(self.exchange.send)])

    def from_experts(self, outputs: Tensor) -> Tensor:
        back = self.exchange.from_experts(outputs)
        # On a GPU the rows of this rank's tokens continue behind the last group (`Groups`); nobody reads those.
        return F.pad(back, (0, 0, 0, len(self.order.token) - len(back)))


@dataclass(frozen=True)
class ExchangedDispatch:
    """To the experts of this rank's tensor-parallel part (`part`), whoever has them. Collective over "expert"."""

    part: LocalDispatch
    state: ParallelState

    def __call__(self, experts: Tensor, keep: Tensor | None) -> ExchangedRoute:
        order = self.part(experts, keep).order
        exchange = Exchange.plan(order.groups.sizes, self.state)
        return ExchangedRoute(order, Groups(exchange.counts), exchange)


def build_dispatch(experts: int, state: ParallelState) -> Dispatch:
    """For a layer of `experts` experts: whole ones on each tensor-parallel rank, in order, and of these on each
    expert-parallel rank."""
    count = experts // state.tp_size
    part = LocalDispatch(state.tp_rank * count, count, experts)
    return part if state.ep_size == 1 else ExchangedDispatch(part, state)
