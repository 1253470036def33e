"""Dispatch over ranks that share experts against dispatch on one rank, rows behind the last group included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.layers.moe.dispatch import Dispatch, ExchangedRows, LocalDispatch, LocalRows, build_dispatch
from megatron.layers.moe.grouped_linear import Groups, grouped_linear
from megatron.layers.moe.permute import gather_rows, order_by
from megatron.mpu.exchange import Exchange
from megatron.mpu.initial_weights import first_expert
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu

TOKENS, HIDDEN, EXPERTS, CHOICES = 10, 6, 8, 2


def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, experts, weights, which are kept, of a rank's tokens; and the experts' matrices, everybody's."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator, dtype=torch.float64)
    scores[:, 5] = -1.0  # nobody chooses this one
    weights, experts = scores.topk(CHOICES)
    keep = torch.rand(TOKENS, CHOICES, generator=generator) > 0.2
    matrices = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return x, experts, weights, keep, matrices


def through(dispatch: Dispatch, rank: int, dropping: bool, first: int, count: int) -> dict[str, Tensor]:
    x, experts, weights, keep, matrices = inputs(rank)
    own = matrices[first : first + count].clone().requires_grad_()
    x.requires_grad_()
    weights.requires_grad_()
    sent = dispatch(x, experts, keep if dropping else None)
    y = sent.combine(grouped_linear(sent.rows, own, sent.groups), weights)
    (y * torch.arange(1, HIDDEN + 1)).sum().backward()
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, "matrices": own.grad}


def by_definition(rank: int, dropping: bool) -> dict[str, Tensor]:
    """Every token through each of its experts, one by one."""
    x, experts, weights, keep, matrices = (t.clone() for t in inputs(rank))
    for tensor in (x, weights, matrices):
        tensor.requires_grad_()
    rows = [
        sum(
            (
                weights[t, j] * (matrices[experts[t, j]] @ x[t])
                for j in range(CHOICES)
                if not dropping or bool(keep[t, j])
            ),
            torch.zeros(HIDDEN, dtype=torch.float64),
        )
        for t in range(TOKENS)
    ]
    y = torch.stack(rows)
    (y * torch.arange(1, HIDDEN + 1)).sum().backward()
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, "matrices": matrices.grad}


def on_ranks(rank: int, world: int, dp: int, tp: int, dropping: bool) -> dict[str, Any]:
    state = ParallelState.build(Topology({"pipe": 1, "data": dp, "model": tp}), rank, "cpu", ep_size=dp)
    first = first_expert(EXPERTS, state)
    found = through(build_dispatch(EXPERTS, state), state.dp_rank, dropping, first, EXPERTS // (dp * tp))
    return {**found, "data": state.dp_rank, "first": first}


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_outputs_and_gradients_are_those_of_the_definition(dp: int, tp: int, dropping: bool) -> None:
    """Outputs and gradients of tokens are partial sums over tensor-parallel ranks; those of experts hold all tokens."""
    results = run_distributed(on_ranks, dp * tp, dp, tp, dropping)
    expected = [by_definition(rank, dropping) for rank in range(dp)]
    for rank in range(dp):
        for name in ("y", "x", "weights"):
            total = sum(found[name] for found in results if found["data"] == rank)
            torch.testing.assert_close(total, expected[rank][name])
    whole = sum(one["matrices"] for one in expected)
    for found in results:
        held = found["matrices"]
        torch.testing.assert_close(held, whole[found["first"] : found["first"] + len(held)])


def test_rows_behind_the_last_group_stay_where_they_are() -> None:
    x, experts, weights, keep, matrices = inputs(0)
    bucket = experts.masked_fill(~keep, EXPERTS)
    order = order_by(bucket, EXPERTS, complete=False, trim=False)  # as on a GPU
    own = LocalRows(gather_rows(x, order), order)
    here = int(order.groups.sizes.sum())
    assert here < len(own.rows)
    alone = ParallelState.single()
    travelled = Exchange(alone, order.groups.sizes, [here], [here], torch.arange(here), torch.arange(here))

    class Nowhere(Exchange):
        def from_experts(self, rows: Tensor) -> Tensor:
            return rows

    rows = own.rows[: sum(travelled.send)]
    sent = ExchangedRows(rows, Groups(travelled.counts), own, Nowhere(alone, travelled.counts, [here], [here]))
    y = sent.combine(grouped_linear(sent.rows, matrices, sent.groups), weights)
    local = LocalDispatch(0, EXPERTS, EXPERTS)(x, experts, keep)
    torch.testing.assert_close(y, local.combine(grouped_linear(local.rows, matrices, local.groups), weights))
