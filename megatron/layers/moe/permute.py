"""From tokens to rows in the order of their experts, and back, each as one operator with a gather as its gradient.

Legend: t tokens, k experts per token, h hidden, r rows: one for each assignment (token, j-th choice) that stays.

torch would take a scattered sum for one direction of each; gathers are faster, and on a GPU they add in one order.
As single operations a sum over a token's rows is k passes over it in fp32; compiled it is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.layers.moe.grouped_linear import Groups


@dataclass(frozen=True)
class Order:
    """Which assignment is in which row.

    * `token` int64 [r]: the token of each row. `row` int64 [t, k]: the row of each assignment.
    * `choice` int64 [r]: the number of each row's assignment, token · k + j.
    * `present` bool [t, k]: which assignments have a row (`row` is any valid number for the others); None: all.
    * `groups`: rows of each bucket, in order.
    """

    token: Tensor
    choice: Tensor
    row: Tensor
    present: Tensor | None
    groups: Groups


def order_by(bucket: Tensor, buckets: int, *, complete: bool, trim: bool | None = None) -> Order:
    """The order of assignments by their bucket [t, k] int64, in a bucket by token.

    Bucket number `buckets` stands for "not here"; `complete` says that it does not occur. With `trim` (default: on a
    CPU) those have no row; without it they have rows behind all others, so that nothing has to wait for the device to
    say how many there are.
    """
    trim = not bucket.is_cuda if trim is None else trim
    flat = bucket.reshape(-1)
    choice = flat.argsort(stable=True)
    sizes = torch.zeros(buckets + 1, dtype=torch.int64, device=flat.device)
    sizes = sizes.scatter_add_(0, flat, torch.ones_like(flat))[:buckets]
    row = torch.empty_like(choice)
    row[choice] = torch.arange(choice.shape[0], device=flat.device)
    groups, present = Groups(sizes), None if complete else bucket != buckets
    if trim and not complete:
        rows = sum(groups.host)
        choice, row = choice[:rows], row.clamp_(max=max(rows - 1, 0))
    return Order(choice // bucket.shape[1], choice, row.view_as(bucket), present, groups)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, row: Tensor, present: Tensor | None) -> Tensor:
        ctx.row, ctx.present = row, present
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _collect(grad, None, ctx.row, ctx.present), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, token: Tensor, choice: Tensor, row: Tensor, present: Tensor | None
    ) -> Tensor:
        ctx.token, ctx.choice, ctx.row, ctx.present = token, choice, row, present
        ctx.save_for_backward(rows, weights)
        return _collect(rows, weights, row, present)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        back = grad.index_select(0, ctx.token)
        for_weights = None
        if ctx.needs_input_grad[1]:
            along = torch.linalg.vecdot(back.to(weights.dtype), rows.to(weights.dtype)) if len(rows) else rows.sum(1)
            for_weights = _of_assignments(along, ctx.row, ctx.present)
        if not ctx.needs_input_grad[0]:
            return None, for_weights, None, None, None, None
        flat = weights if ctx.present is None else weights.masked_fill(~ctx.present, 0.0)
        scale = flat.reshape(-1).index_select(0, ctx.choice)
        return back.mul_(scale.unsqueeze(1)), for_weights, None, None, None, None


def _of_assignments(values: Tensor, row: Tensor, present: Tensor | None) -> Tensor:
    """values [r] -> [t, k], 0 where an assignment has no row."""
    if not len(values):
        return values.new_zeros(row.shape)
    found = values[row]
    return found if present is None else found.masked_fill(~present, 0.0)


def _collect(rows: Tensor, weights: Tensor | None, row: Tensor, present: Tensor | None) -> Tensor:
    """Σ over a token's assignments of (weight ·) row: [r, h] -> [t, h]; the sum is in fp32 or wider."""
    tokens, choices = row.shape
    total = torch.zeros(tokens, rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    if not len(rows):
        return total.to(rows.dtype)
    for j in range(choices):
        part = rows.index_select(0, row[:, j])
        if present is not None:
            # Not by a product with 0: behind the last group anything may be stored.
            part = part.masked_fill(~present[:, j].unsqueeze(1), 0.0)
        if weights is None:
            total += part
        else:
            total.addcmul_(part.to(total.dtype), weights[:, j].unsqueeze(1).to(total.dtype))
    return total.to(rows.dtype)


def gather_rows(x: Tensor, order: Order) -> Tensor:
    """[t, h] -> [r, h]: each row is its token's. The gradient of a token is the sum of its rows'."""
    return _Gather.apply(x, order.token, order.row, order.present)


def combine_rows(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """[r, h], weights [t, k] -> [t, h]: Σ weight · row over a token's assignments."""
    return _Combine.apply(rows, weights, order.token, order.choice, order.row, order.present)
