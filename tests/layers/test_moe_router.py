"""Routers, losses and balancing against formulas written out and against transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megatron.layers.moe.balancing import move_biases
from megatron.layers.moe.expert_load import Load
from megatron.layers.moe.layer import MixtureOfExperts
from megatron.layers.moe.losses import balance_loss, z_loss
from megatron.layers.moe.router import Router, Routing
from megatron.layers.moe.sinkhorn import ITERATIONS, sinkhorn
from megatron.mpu.state import ParallelState
from tests.model.networks import tiny

pytestmark = pytest.mark.cpu

EXPERTS = 6
TOPK: dict[str, Any] = {"moe_num_experts": EXPERTS, "moe_router_type": "topk", "moe_top_k": 2}


def _tokens(count: int = 20, seed: int = 0) -> Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def _router(**changes: Any) -> Router:
    router = Router(tiny(**{**TOPK, **changes}), ParallelState.single())
    with torch.no_grad():
        router.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(7))
    return router


def _route(router: Router, x: Tensor) -> Routing:
    return Routing(*router(x))


# ---- topk


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_topk_takes_the_largest_scores(score: str, normalize: bool) -> None:
    router, x = _router(moe_router_score=score, moe_normalize_topk=normalize, moe_routed_scaling=2.5), _tokens()
    routing = _route(router, x)
    logits = x.double() @ router.weight.double().T
    scores = logits.softmax(-1) if score == "softmax" else 1 / (1 + (-logits).exp())
    for token in range(len(x)):
        best = sorted(range(EXPERTS), key=lambda expert: -scores[token, expert].item())[:2]
        assert routing.experts[token].tolist() == best
        weights = scores[token, best]
        weights = 2.5 * (weights / weights.sum() if normalize else weights)
        torch.testing.assert_close(routing.weights[token].double(), weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(routing.shares.double(), scores / scores.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)


def test_half_precision_routes_in_single() -> None:
    router = _router().bfloat16()
    x = _tokens().bfloat16()
    routing = _route(router, x)
    assert routing.logits.dtype == routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.logits, x.float() @ router.weight.float().T)


def test_jitter_disturbs_training_alone() -> None:
    router, x = _router(moe_jitter_eps=0.1), _tokens()
    torch.manual_seed(3)
    noise = torch.empty_like(x).uniform_(0.9, 1.1)
    torch.manual_seed(3)
    torch.testing.assert_close(_route(router, x).logits, (x * noise) @ router.weight.T)
    router.eval()
    torch.testing.assert_close(_route(router, x).logits, x @ router.weight.T)


def test_expert_bias_decides_who_is_chosen_and_not_with_which_weight() -> None:
    router, x = _router(moe_bias_balancing_rate=0.1), _tokens()
    with torch.no_grad():
        router.expert_bias[4] = 10.0
        router.expert_bias[1] = -10.0
    routing = _route(router, x)
    assert (routing.experts[:, 0] == 4).all() and (routing.experts != 1).all()
    probabilities = (x @ router.weight.T).softmax(-1)
    torch.testing.assert_close(routing.weights, probabilities.gather(1, routing.experts))


def test_expert_bias_is_not_trained_and_stays_in_single_precision() -> None:
    router = _router(moe_bias_balancing_rate=0.001)
    assert not router.expert_bias.requires_grad and router.expert_bias.spec.keep_fp32
    _route(router, _tokens()).weights.sum().backward()
    assert router.expert_bias.grad is None and router.weight.grad is not None


# ---- sinkhorn


def _sinkhorn_reference(logits: Tensor, rounds: int) -> Tensor:
    """Rows scaled to 1/t, then columns to 1/E, `rounds` times, in fp64."""
    cost = logits.double().exp()
    tokens, experts = cost.shape
    columns = torch.ones(experts, dtype=torch.float64)
    for _ in range(rounds):
        rows = 1 / (tokens * (cost * columns).sum(1))
        columns = 1 / (experts * (cost * rows.unsqueeze(1)).sum(0))
    return rows.unsqueeze(1) * cost * columns


def test_sinkhorn_is_three_rounds() -> None:
    """The GPT-NeoX fork's loop stops when something has changed, so after one."""
    logits = 3 * torch.randn(50, EXPERTS, generator=torch.Generator().manual_seed(1))
    assert ITERATIONS == 3
    torch.testing.assert_close(sinkhorn(logits).double(), _sinkhorn_reference(logits, 3), rtol=1e-4, atol=1e-7)
    assert not torch.allclose(sinkhorn(logits).double(), _sinkhorn_reference(logits, 1), rtol=1e-2)
    torch.testing.assert_close(sinkhorn(logits).sum(0), torch.full((EXPERTS,), 1 / EXPERTS))


def test_sinkhorn_survives_large_logits() -> None:
    logits = torch.randn(50, EXPERTS, generator=torch.Generator().manual_seed(1)) * 60
    logits[0] = 300.0
    assert sinkhorn(logits).isfinite().all()


@pytest.mark.parametrize("choices", [1, 2])
def test_sinkhorn_balances_in_training_and_weighs_as_gpt_neox(choices: int) -> None:
    router = _router(moe_router_type="sinkhorn", moe_top_k=choices)
    with torch.no_grad():
        router.weight[2] += 1.0  # everybody's favourite where x sums to something positive
    x = _tokens(60) + 0.3
    logits = x @ router.weight.T
    scores = logits.sigmoid() if choices == 1 else logits.softmax(-1)
    trained = _route(router, x)
    assert torch.equal(trained.experts, sinkhorn(logits).topk(choices).indices)
    torch.testing.assert_close(trained.weights, scores.gather(1, trained.experts))
    evaluated = _route(router.eval(), x)
    assert torch.equal(evaluated.experts, scores.topk(choices).indices)
    loads = [int((routing.experts == 2).sum()) for routing in (trained, evaluated)]
    assert loads[0] < 0.8 * loads[1]


# ---- losses


def test_balance_loss_is_transformers_for_one_sequence() -> None:
    logits = torch.randn(24, EXPERTS, generator=torch.Generator().manual_seed(1)).requires_grad_()
    shares = logits.softmax(-1)
    ours = balance_loss(shares, shares.topk(2).indices, sequences=1)
    (mine,) = torch.autograd.grad(ours, logits)
    theirs = load_balancing_loss_func((logits,), EXPERTS, 2)
    (expected,) = torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(mine, expected)


def test_balance_loss_is_the_mean_over_sequences_however_they_are_split() -> None:
    shares = torch.randn(4 * 16, EXPERTS, generator=torch.Generator().manual_seed(1)).softmax(-1)
    chosen = shares.topk(2).indices
    whole = balance_loss(shares, chosen, sequences=4)
    single = [balance_loss(s, c, 1) for s, c in zip(shares.chunk(4), chosen.chunk(4), strict=True)]
    torch.testing.assert_close(whole, torch.stack(single).mean())
    assert not torch.isclose(whole, balance_loss(shares, chosen, sequences=1))  # as transformers would over a batch


def test_balance_loss_of_a_balanced_sequence_is_top_k() -> None:
    shares = torch.full((EXPERTS, EXPERTS), 1 / EXPERTS)
    chosen = torch.stack([torch.arange(EXPERTS), (torch.arange(EXPERTS) + 1) % EXPERTS], 1)
    assert float(balance_loss(shares, chosen, 1)) == pytest.approx(2.0)


def test_z_loss_formula() -> None:
    logits = torch.randn(9, EXPERTS, generator=torch.Generator().manual_seed(1))
    expected = sum(math.log(sum(math.exp(x) for x in row)) ** 2 for row in logits.tolist()) / 9
    assert float(z_loss(logits)) == pytest.approx(expected)


# ---- what is counted


def test_load_is_counted_once_in_backward_and_never_in_evaluation() -> None:
    load, chosen = Load(3, torch.device("cpu")), torch.tensor([[0, 1], [1, 2]])
    keep = torch.tensor([[True, False], [True, True]])
    weights = torch.ones(2, 2, requires_grad=True)
    watched = load.watch(weights, chosen, keep, torch.tensor(2.5), torch.tensor(0.5))
    load.watch(weights, chosen, keep, None, None)  # a forward pass that is repeated
    with torch.no_grad():
        load.watch(weights, chosen, keep, None, None)
    assert not load.take().any()
    (3 * watched).sum().backward()
    assert torch.equal(weights.grad, torch.full((2, 2), 3.0))
    assert load.take().tolist() == [1, 2, 1, 1, 2.5, 0.5, 1]
    assert not load.take().any()


def test_biases_move_by_the_sign_of_the_deviation() -> None:
    layer = MixtureOfExperts(
        tiny(**{**TOPK, "moe_num_experts": 4, "moe_bias_balancing_rate": 0.5}), ParallelState.single()
    )
    move_biases([layer], torch.tensor([[10.0, 2.0, 5.0, 3.0]], dtype=torch.float64), 0.25)
    move_biases([layer], torch.tensor([[4.0, 4.0, 4.0, 4.0]], dtype=torch.float64), 0.25)
    assert layer.router.expert_bias.tolist() == [-0.25, 0.25, 0.0, 0.25]
