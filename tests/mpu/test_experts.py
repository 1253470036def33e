"""Experts over ranks: who holds which, initial values, counts, and rows that travel to their experts and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.mpu import initial_weights, owned, sharding
from megatron.mpu.exchange import Exchange
from megatron.mpu.sharding import ParamSpec
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu

EXPERTS = 8


def normal(full: Tensor, generator: torch.Generator) -> None:
    full.normal_(generator=generator)


def spec(**changes: Any) -> ParamSpec:
    fields = {
        "shape": (EXPERTS, 3, 2),
        "init": normal,
        "split_dim": 0,
        "experts": True,
        "name": "2.mlp.experts.linear1",
    }
    return ParamSpec(**{**fields, **changes})


class Layer(nn.Module):
    """Experts beside a replicated and a tensor-parallel parameter."""

    def __init__(self, state: ParallelState) -> None:
        super().__init__()
        self.experts = sharding.parameter(spec(name=""), state)
        self.router = sharding.parameter(ParamSpec(shape=(EXPERTS, 2), init=normal), state)
        self.dense = sharding.parameter(ParamSpec(shape=(4, 2), init=normal, split_dim=0), state)


def layer(state: ParallelState) -> Layer:
    module = Layer(state)
    sharding.bind(module, 2)
    initial_weights.initialize(module, 7, state)
    return module


def state_of(rank: int, dp: int, tp: int, ep: int) -> ParallelState:
    """A rank of a larger layout, for code that does not communicate."""
    return ParallelState(Topology({"pipe": 1, "data": dp, "model": tp}), rank, torch.device("cpu"), ep_size=ep)


def whole() -> Tensor:
    return layer(ParallelState.single()).experts.detach()


@pytest.mark.parametrize(("dp", "tp", "ep"), [(4, 1, 2), (4, 1, 4), (2, 2, 2), (4, 2, 4)])
def test_initial_values_and_place_do_not_depend_on_the_layout(dp: int, tp: int, ep: int) -> None:
    full, held = whole(), EXPERTS // (tp * ep)
    owners = torch.zeros(EXPERTS)
    for rank in range(dp * tp):
        state = state_of(rank, dp, tp, ep)
        local = layer(state).experts.detach()
        first = initial_weights.first_expert(EXPERTS, state)
        assert torch.equal(local, full[first : first + held])
        part = sharding.shard(full, spec(), state.tp_rank, tp)
        assert torch.equal(local, owned.own_experts(part, spec(), state))
        owners[first : first + held] += owned.is_owned(spec(), state)
    assert torch.equal(owners, torch.full((EXPERTS,), dp / ep))  # once in each copy of the model


def test_experts_differ_from_each_other() -> None:
    assert len({tuple(expert.flatten().tolist()) for expert in whole()}) == EXPERTS


def reached(rank: int, world: int, dp: int, tp: int, ep: int) -> dict[str, Any]:
    state = ParallelState.build(Topology({"pipe": 1, "data": dp, "model": tp}), rank, "cpu", ep_size=ep)
    module = layer(state)
    groups: dict[str, list[int]] = {}
    for name in ("expert", "expert_data"):
        ranks = [rank]
        if (group := state.group(name)) is not None:
            ranks = [0] * group.size()
            torch.distributed.all_gather_object(ranks, rank, group=group)
        groups[name] = ranks
    parts = [module.experts.detach()] * ep
    if ep > 1:
        torch.distributed.all_gather_object(parts, parts[0], group=state.group("expert"))
    counted = [p.detach().square().sum() for p in module.parameters() if owned.is_owned(sharding.spec_of(p), state)]
    return {
        **groups,
        "part": torch.cat(parts),
        "tp": state.tp_rank,
        "count": owned.count_parameters(module, state),
        "norm": float(owned.sum_owned(torch.stack([*counted, torch.zeros(())]).sum(), state).sqrt()),
    }


@pytest.mark.parametrize(
    ("dp", "tp", "ep", "expert", "expert_data"),
    [
        (4, 1, 2, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        (4, 1, 4, [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
        (2, 2, 2, [[0, 2], [1, 3]], [[0], [1], [2], [3]]),
        (2, 2, 1, [[0], [1], [2], [3]], [[0, 2], [1, 3]]),
    ],
)
def test_groups_gathering_counts_and_norms(
    dp: int, tp: int, ep: int, expert: list[list[int]], expert_data: list[list[int]]
) -> None:
    full, alone = whole(), layer(ParallelState.single())
    norm = float(torch.cat([p.detach().flatten() for p in alone.parameters()]).norm())
    for rank, seen in enumerate(run_distributed(reached, dp * tp, dp, tp, ep)):
        assert seen["expert"] == next(ranks for ranks in expert if rank in ranks)
        assert seen["expert_data"] == next(ranks for ranks in expert_data if rank in ranks)
        assert torch.equal(seen["part"], sharding.shard(full, spec(), seen["tp"], tp))
        assert seen["count"] == sum(p.numel() for p in alone.parameters())
        assert seen["norm"] == pytest.approx(norm, rel=1e-6)


def travel(rank: int, world: int, counts: list[list[int]], dtype: torch.dtype) -> dict[str, Any]:
    """Rows that say (their rank, their expert, their number) go to experts, which multiply by (expert + 1)."""
    state = ParallelState.build(Topology({"pipe": 1, "data": world, "model": 1}), rank, "cpu", ep_size=world)
    mine = torch.tensor(counts[rank])
    experts = torch.arange(len(mine)).repeat_interleave(mine)
    rows = torch.stack([torch.full_like(experts, rank), experts, torch.arange(len(experts))], 1).to(dtype)
    rows.requires_grad_()
    exchange = Exchange.plan(mine, state)
    there = exchange.to_experts(rows)
    first = initial_weights.first_expert(len(mine), state)
    here = torch.arange(first, first + len(exchange.counts)).repeat_interleave(exchange.counts)
    assert torch.equal(there[:, 1].long(), here), "rows are sorted by expert"
    back = exchange.from_experts(there * (here + 1)[:, None].to(dtype))
    back.backward(torch.ones_like(back) * (rank + 1))
    return {
        "sent": rows.detach(),
        "back": back.detach(),
        "grad": rows.grad,
        "counts": exchange.counts,
        "sources": there[:, 0].long().bincount(minlength=world).tolist(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "counts",
    [
        [[2, 0, 1, 3], [0, 4, 0, 1]],  # uneven
        [[3, 2, 0, 0], [1, 0, 0, 0]],  # nothing for the second rank's experts
        [[0, 0, 0, 0], [0, 1, 2, 0]],  # nothing from the first rank
        [[0, 0, 0, 0], [0, 0, 0, 0]],  # nothing at all
    ],
)
def test_rows_come_back_to_where_they_were(counts: list[list[int]], dtype: torch.dtype) -> None:
    for rank, seen in enumerate(run_distributed(travel, 2, counts, dtype)):
        factor = seen["sent"][:, 1:2] + 1
        assert torch.equal(seen["back"], seen["sent"] * factor)
        assert torch.equal(seen["grad"], (factor * (rank + 1)).expand_as(seen["sent"]))
        mine = slice(2 * rank, 2 * rank + 2)
        assert seen["counts"].tolist() == [sum(column) for column in zip(*counts, strict=True)][mine]
        assert seen["sources"] == [sum(sent[mine]) for sent in counts]


def test_one_rank_exchanges_nothing() -> None:
    counts, rows = torch.tensor([1, 2]), torch.randn(3, 4)
    exchange = Exchange.plan(counts, ParallelState.single())
    assert exchange.to_experts(rows) is rows
    assert exchange.from_experts(rows) is rows
    assert exchange.counts is counts


def test_layouts_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"expert_parallel_size: 3 .*\b4 data-parallel"):
        state_of(0, 4, 1, 3)
    with pytest.raises(UserError, match=r"\b6 experts .*model_parallel_size=1 x expert_parallel_size=4"):
        sharding.parameter(spec(shape=(6, 2)), state_of(0, 4, 1, 4))
    with pytest.raises(ValueError, match="along dimension 0"):
        spec(split_dim=1)


def test_one_expert_at_a_time_is_drawn() -> None:
    """A rank draws the experts that it holds, each by itself: never a whole parameter."""
    drawn: list[tuple[int, ...]] = []

    def watching(full: Tensor, generator: torch.Generator) -> None:
        drawn.append(tuple(full.shape))

    module = nn.Module()
    state = state_of(1, 4, 1, 4)
    module.experts = sharding.parameter(spec(name="", init=watching), state)
    sharding.bind(module, 2)
    initial_weights.initialize(module, 1, state)
    assert drawn == [(3, 2)] * (EXPERTS // 4)
