"""Pieces of a mixture of experts against formulas written out: grouped products, the way to the experts and back."""

from __future__ import annotations

import importlib
import math
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megatron.layers.moe import dispatch
from megatron.layers.moe.capacity import capacity, within_capacity
from megatron.layers.moe.dispatch import LocalDispatch
from megatron.layers.moe.experts import Experts
from megatron.layers.moe.grouped_linear import Groups, grouped_linear, one_by_one
from megatron.layers.moe.permute import combine_rows, gather_rows, order_by
from megatron.mpu.state import ParallelState
from tests.model.networks import tiny

pytestmark = pytest.mark.cpu

grouped_linear_module = importlib.import_module("megatron.layers.moe.grouped_linear")


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _groups(sizes: list[int]) -> Groups:
    return Groups(torch.tensor(sizes))


# ---- grouped products


@pytest.mark.parametrize("sizes", [[3, 0, 4, 1], [0, 0, 0, 8], [2, 2, 2, 2]], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_each_row_is_multiplied_by_the_matrix_of_its_group(sizes: list[int], with_bias: bool) -> None:
    x, weight, bias = _random(8, 5), _random(4, 3, 5, seed=1), _random(4, 3, seed=2)
    group = [g for g, size in enumerate(sizes) for _ in range(size)]
    y = grouped_linear(x, weight, _groups(sizes), bias if with_bias else None)
    for i, g in enumerate(group):
        torch.testing.assert_close(y[i], weight[g] @ x[i] + (bias[g] if with_bias else 0.0))


def test_gradients_of_the_grouped_product() -> None:
    tensors = [t.requires_grad_() for t in (_random(7, 3), _random(3, 2, 3, seed=1), _random(3, 2, seed=2))]
    groups = _groups([4, 0, 3])
    assert torch.autograd.gradcheck(lambda x, w, b: grouped_linear(x, w, groups, b), tensors)
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, groups), tensors[:2])


def test_a_group_without_rows_has_the_gradient_zero() -> None:
    weight = _random(2, 2, 3).requires_grad_()
    grouped_linear(_random(4, 3, seed=1), weight, _groups([4, 0])).sum().backward()
    assert weight.grad is not None and weight.grad[0].abs().min() > 0 and not weight.grad[1].any()


def test_only_what_is_asked_for_is_computed() -> None:
    x = _random(4, 3).requires_grad_()
    grouped_linear(x, _random(2, 2, 3, seed=1), _groups([1, 3])).sum().backward()
    assert x.grad is not None


def test_rows_behind_the_last_group_are_nobodys() -> None:
    x, weight = _random(6, 3).requires_grad_(), _random(2, 2, 3, seed=1).requires_grad_()
    y = grouped_linear(x, weight, _groups([2, 2]))
    y[:4].sum().backward()
    assert not y[4:].any() and x.grad is not None and not x.grad[4:].any()


def test_the_operator_passes_torchs_own_checks() -> None:
    args = (_random(5, 3).requires_grad_(), _random(2, 2, 3, seed=1).requires_grad_(), None, [0, 2, 5])
    torch.library.opcheck(one_by_one, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


# ---- to the experts and back


def _chosen(tokens: int = 9, choices: int = 2, experts: int = 4, seed: int = 0) -> Tensor:
    ranked = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).topk(choices)
    return ranked.indices


def _reference(x: Tensor, chosen: Tensor, weights: Tensor, first: int, count: int, keep: Tensor | None) -> Tensor:
    """Σ weight · (number of the expert + 1) · x, token by token."""
    out = torch.zeros_like(x)
    for token, experts in enumerate(chosen.tolist()):
        for j, expert in enumerate(experts):
            if first <= expert < first + count and (keep is None or keep[token, j]):
                out[token] = out[token] + weights[token, j] * (expert + 1) * x[token]
    return out


@pytest.mark.parametrize("part", [(0, 4), (0, 2), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("dropping", [False, True])
def test_rows_go_to_their_experts_and_come_back_weighted(part: tuple[int, int], dropping: bool) -> None:
    first, count = part
    chosen, x, weights = _chosen(), _random(9, 3).requires_grad_(), _random(9, 2, seed=1).requires_grad_()
    keep = torch.rand(9, 2, generator=torch.Generator().manual_seed(5)) < 0.6 if dropping else None

    def run(x: Tensor, weights: Tensor) -> Tensor:
        order = LocalDispatch(first, count, 4)(chosen, keep).order
        number = torch.arange(first + 1, first + count + 1, dtype=x.dtype).repeat_interleave(order.groups.sizes)
        return combine_rows(gather_rows(x, order) * number.unsqueeze(1), weights, order)

    torch.testing.assert_close(run(x, weights), _reference(x, chosen, weights, first, count, keep))
    assert torch.autograd.gradcheck(run, (x, weights))


@pytest.mark.parametrize(
    ("form", "backend"),
    [("complete", "aot_eager"), ("behind", "aot_eager"), pytest.param("behind", "inductor", marks=pytest.mark.full)],
)
def test_both_ways_compile_to_one_graph_each(form: str, backend: str) -> None:
    """As blocks that are not compiled whole have them: the same sums and gradients for every number of tokens, the rows
    behind the last group left out."""
    torch._dynamo.reset()
    counters.clear()
    gather, combine = (torch.compile(f, fullgraph=True, backend=backend) for f in (gather_rows, combine_rows))
    for tokens in (9, 13, 21):
        chosen = _chosen(tokens)
        bucket = chosen if form == "complete" else chosen.masked_fill(_chosen(tokens, seed=5) < 2, 4)
        order = order_by(bucket, 4, complete=form == "complete", trim=False)
        push, number = _random(tokens, 3, seed=3), torch.ones(len(order.token), 1, dtype=torch.float64)
        here = sum(order.groups.host)
        number[:here, 0] = torch.arange(1.0, 5.0, dtype=torch.float64).repeat_interleave(order.groups.sizes)
        x, weights = _random(tokens, 3).requires_grad_(), _random(tokens, 2, seed=1).requires_grad_()

        def outcome(y: Tensor, x: Tensor, weights: Tensor, push: Tensor = push) -> list[Tensor]:
            return [y, *torch.autograd.grad((y * push).sum(), (x, weights))]

        # What is behind the last group is anything, both ways.
        rows = _Spoilt.apply(gather(x, order) * number, here)
        found = outcome(combine(rows, weights, order), x, weights)
        expected = outcome(_reference(x, chosen, weights, 0, 4, bucket != 4), x, weights)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    # The first size as it is, the others as one symbol.
    assert counters["stats"]["unique_graphs"] == 4 and not counters["graph_break"]


class _Spoilt(torch.autograd.Function):
    """Rows from `here` on, and their gradients, become NaN."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, here: int) -> Tensor:
        ctx.here = here
        return torch.cat([rows[:here], torch.full_like(rows[here:], math.nan)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.cat([grad[: ctx.here], torch.full_like(grad[ctx.here :], math.nan)]), None


def test_rows_of_an_expert_are_in_the_order_of_the_tokens() -> None:
    order = order_by(torch.tensor([[1, 0], [0, 1], [1, 0]]), 2, complete=True)
    assert order.token.tolist() == [0, 1, 2, 0, 1, 2] and order.groups.host == [3, 3]


def test_a_rank_to_which_no_token_comes() -> None:
    x, weights = _random(3, 2).requires_grad_(), _random(3, 1, seed=1).requires_grad_()
    order = order_by(torch.full((3, 1), 2), 2, complete=False)
    y = combine_rows(gather_rows(x, order), weights, order)
    y.sum().backward()
    assert y.shape == (3, 2) and not y.any() and not x.grad.any() and not weights.grad.any()


def test_half_precision_is_summed_in_single() -> None:
    """256 + 1 is 256 in bf16: eight choices of 1 beside one of 256 would all be lost."""
    chosen, x = torch.arange(9).unsqueeze(0), torch.ones(1, 1, dtype=torch.bfloat16)
    order = order_by(chosen, 9, complete=True)
    weights = torch.tensor([[256.0, *[1.0] * 8]])
    assert float(combine_rows(gather_rows(x, order), weights, order)) == 264.0


class _Poisoned(torch.autograd.Function):
    """torch's grouped product as a GPU gives it: rows behind the last group are whatever was there, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return _Poisoned.poison(one_by_one(x, weight.mT.contiguous(), None, [0, *offsets.tolist()]), offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, offsets = ctx.saved_tensors
        dx, dw = torch.zeros_like(x), torch.zeros_like(weight)
        for group, (first, last) in enumerate(pairwise([0, *offsets.tolist()])):
            dx[first:last] = grad[first:last] @ weight[group].T
            dw[group] = x[first:last].T @ grad[first:last]
        return _Poisoned.poison(dx, offsets), dw, None

    @staticmethod
    def poison(y: Tensor, offsets: Tensor) -> Tensor:
        y = y.clone()
        y[int(offsets[-1]) :] = math.nan
        return y


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_nobody_reach_nothing(rank: int, dropping: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU keeps rows for assignments that are not here, and never says how many there are. What comes out of them is
    undefined, so nothing of it may enter outputs or gradients."""
    model = tiny(moe_num_experts=4, moe_router_type="topk", moe_top_k=2, activation="swiglu", moe_expert_bias=True)
    layer = Experts(model, ParallelState.single()).double()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(i))
    mine = slice(2 * rank, 2 * rank + 2)
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, torch.nn.Parameter(parameter[mine].detach().clone()))
    chosen, x, weights = _chosen(), _random(9, 32).requires_grad_(), _random(9, 2, seed=1).requires_grad_()
    keep = torch.rand(9, 2, generator=torch.Generator().manual_seed(5)) < 0.6 if dropping else None
    inputs = [x, weights, *layer.parameters()]

    def run() -> list[Tensor]:
        order = LocalDispatch(2 * rank, 2, 4)(chosen, keep).order
        out = combine_rows(layer(gather_rows(x, order), order.groups), weights, order)
        return [out, *torch.autograd.grad((out * _random(9, 32, seed=3)).sum(), inputs)]

    expected = run()
    monkeypatch.setattr(dispatch, "order_by", partial(order_by, trim=False))
    monkeypatch.setattr(grouped_linear_module, "_takes_grouped", lambda *_: True)
    monkeypatch.setattr(grouped_linear_module, "_torch_grouped", lambda: lambda x, w, offs: _Poisoned.apply(x, w, offs))
    for found, theirs in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, theirs)


def test_torchs_grouped_product_is_used_as_it_wants_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real operator, on a CPU in fp32: layouts, offsets, gradients."""
    x, weight = (_random(*shape).float().requires_grad_() for shape in ((32, 16), (3, 8, 16)))
    groups, push = _groups([16, 0, 16]), _random(32, 8, seed=4).float()
    expected = torch.autograd.grad((grouped_linear(x, weight, groups) * push).sum(), (x, weight))
    monkeypatch.setattr(grouped_linear_module, "_takes_grouped", lambda *_: True)
    found = torch.autograd.grad((grouped_linear(x, weight, groups) * push).sum(), (x, weight))
    torch.testing.assert_close(found, expected)


# ---- capacity


def test_capacity_is_rounded_up_and_at_least_one() -> None:
    found = [capacity(factor, torch.tensor([10, 1]), 2, 8).tolist() for factor in (1.0, 1.2, 2.0, 0.01)]
    assert found == [[3, 1], [3, 1], [5, 1], [1, 1]]


def _rows(count: int, tokens: int) -> Tensor:
    return torch.arange(count).repeat_interleave(tokens)


def test_first_come_first_served_in_each_sequence() -> None:
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 1], [1, 2], [1, 0]])  # two sequences of three tokens
    kept = within_capacity(chosen, _rows(2, 3), experts=3, factor=1.0)  # two per expert and sequence
    expected = [[True, True], [True, True], [False, True], [True, True], [True, True], [False, True]]
    assert kept.tolist() == expected


@pytest.mark.parametrize("lengths", [[40], [13, 1, 26], [7] * 5], ids=str)
@pytest.mark.parametrize("factor", [0.3, 0.7, 1.0, 5.0])
def test_capacity_counted_one_by_one(lengths: list[int], factor: float) -> None:
    sequence = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)])
    chosen, taken, expected = _chosen(tokens=len(sequence), experts=5), {}, []
    for i, experts in zip(sequence.tolist(), chosen.tolist(), strict=True):
        expected.append([])
        for expert in experts:
            taken[i, expert] = taken.get((i, expert), 0) + 1
            expected[-1].append(taken[i, expert] <= max(1, math.ceil(factor * lengths[i] * 2 / 5)))
    assert within_capacity(chosen, sequence, 5, factor).tolist() == expected


def test_drops_depend_neither_on_other_sequences_nor_on_later_tokens() -> None:
    chosen = _chosen(tokens=40, experts=5)
    whole = within_capacity(chosen, _rows(4, 10), 5, 0.7)
    assert not whole.all() and whole.any()
    parts = torch.cat([within_capacity(part, _rows(1, 10), 5, 0.7) for part in chosen.chunk(4)])
    assert torch.equal(whole, parts)
    changed = chosen.clone()
    changed[35:] = (changed[35:] + 1) % 5  # the end of the last sequence
    assert torch.equal(within_capacity(changed, _rows(4, 10), 5, 0.7)[:35], whole[:35])
