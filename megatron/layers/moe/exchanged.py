"""Dispatch under expert parallelism: rows travel to the ranks that hold their experts, and their outputs back.

Legend: t tokens, k experts per token, h hidden, n rows of this rank's tokens, m rows for this rank's experts.

Each tensor-parallel rank deals with the experts of its part, as without expert parallelism; the ranks of the group
"expert" divide this part, and every one of them has other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatron.layers.moe.dispatch import LocalDispatch, LocalRows
from megatron.layers.moe.grouped_linear import Groups
from megatron.mpu.exchange import Exchange
from megatron.mpu.state import ParallelState


@dataclass(frozen=True)
class ExchangedRows:
    """The rows [m, h] of all ranks for this rank's experts."""

    rows: Tensor
    groups: Groups
    own: LocalRows
    exchange: Exchange

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        back = self.exchange.from_experts(outputs)
        # On a GPU the rows of this rank's tokens go on behind the last group (`Groups`); nobody reads those.
        return self.own.combine(F.pad(back, (0, 0, 0, len(self.own.rows) - len(back))), weights)


@dataclass(frozen=True)
class ExchangedDispatch:
    """`part`: the dispatch to the experts of this rank's tensor-parallel part. Each call is collective over the group
    "expert"."""

    part: LocalDispatch
    state: ParallelState

    def __call__(self, x: Tensor, experts: Tensor, keep: Tensor | None) -> ExchangedRows:
        own = self.part(x, experts, keep)
        exchange = Exchange.plan(own.groups.sizes, self.state)
        rows = exchange.to_experts(own.rows[: sum(exchange.send)])
        return ExchangedRows(rows, Groups(exchange.counts), own, exchange)
