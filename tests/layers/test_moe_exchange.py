"""Dispatch over ranks that share experts against dispatch on one rank, rows behind the last group included."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.layers.carry import Context
from megatron.layers.moe import MixtureOfExperts, dispatch
from megatron.layers.moe.dispatch import Dispatch, ExchangedRoute, LocalRoute, Route, build_dispatch
from megatron.layers.moe.grouped_linear import Groups, grouped_linear
from megatron.layers.moe.permute import combine_rows, gather_rows, order_by
from megatron.mpu.exchange import Exchange
from megatron.mpu.initial_weights import first_expert
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.distributed import run_distributed
from tests.host_waits import HostWaits
from tests.model.networks import tiny
from tests.model.test_moe import EVERYTHING

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


def layer(x: Tensor, route: Route, matrices: Tensor, weights: Tensor) -> Tensor:
    rows = grouped_linear(route.to_experts(gather_rows(x, route.order)), matrices, route.groups)
    return combine_rows(route.from_experts(rows), weights, route.order)


def through(send: Dispatch, rank: int, dropping: bool, first: int, count: int) -> dict[str, Tensor]:
    x, experts, weights, keep, matrices = inputs(rank)
    own = matrices[first : first + count].clone().requires_grad_()
    x.requires_grad_()
    weights.requires_grad_()
    y = layer(x, send(experts, keep if dropping else None), own, weights)
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


def waits_of_a_layer(rank: int, world: int, spread: bool) -> dict[str, int]:
    """Forward and backward as on a GPU: rows are not trimmed, and experts have grouped products.

    `spread`: all experts get tokens; else the last ones none, nor the rank that holds them.
    """
    state = ParallelState.single()
    if world > 1:
        state = ParallelState.build(Topology({"pipe": 1, "data": world, "model": 1}), rank, "cpu", ep_size=world)
    layer = MixtureOfExperts(tiny(**EVERYTHING, moe_capacity_factor=1.0), state)
    layer.experts.grouped = frozenset({torch.float32})
    if spread:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    with mock.patch.object(dispatch, "order_by", partial(order_by, trim=False)), HostWaits() as waits:
        y, loss = layer(x, Context(torch.arange(16).expand(2, 16)))
        (y.sum() + loss).backward()
    return dict(waits.found)


def test_the_host_never_waits_for_a_layer_whose_experts_are_here() -> None:
    assert waits_of_a_layer(0, 1, spread=True) == {}


@pytest.mark.parametrize("spread", [True, False])
def test_the_host_waits_once_for_a_layer_whose_rows_travel(spread: bool) -> None:
    """To know how many rows it sends and gets; nothing else of either direction reads from the device."""
    assert run_distributed(waits_of_a_layer, 2, spread) == [{"exchange.py:plan": 1}] * 2


def test_rows_behind_the_last_group_stay_where_they_are() -> None:
    x, experts, weights, keep, matrices = inputs(0)
    bucket = experts.masked_fill(~keep, EXPERTS)
    order = order_by(bucket, EXPERTS, complete=False, trim=False)  # as on a GPU
    here = int(order.groups.sizes.sum())
    assert here < len(order.token)
    nowhere = Exchange(ParallelState.single(), order.groups.sizes, [here], [here])
    route = ExchangedRoute(order, Groups(order.groups.sizes), nowhere)
    local = LocalRoute(order_by(bucket, EXPERTS, complete=False))
    torch.testing.assert_close(layer(x, route, matrices, weights), layer(x, local, matrices, weights))
