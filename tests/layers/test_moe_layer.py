"""A whole mixture-of-experts layer against the sum written out token by token, in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.layers.carry import Context
from megatron.layers.moe import MixtureOfExperts
from megatron.mpu.state import ParallelState
from tests.model.networks import tiny

pytestmark = pytest.mark.cpu

KEYS: dict[str, Any] = {
    "moe_num_experts": 5,
    "moe_router_type": "topk",
    "moe_top_k": 3,
    "moe_intermediate_size": 12,
    "init_method_std": 0.3,
}
ACT = {"gelu": F.gelu, "relu": F.relu, "swiglu": F.silu, "geglu": F.gelu}
FORMS: list[dict[str, Any]] = [
    {"activation": "swiglu"},
    {"activation": "gelu"},
    {"activation": "relu", "moe_expert_bias": True},
    {"activation": "geglu", "moe_expert_bias": True, "moe_normalize_topk": True},
    {"activation": "swiglu", "moe_shared_expert_size": 8},
    {"activation": "gelu", "moe_shared_expert_size": 8, "moe_shared_expert_gate": True, "moe_routed_scaling": 1.5},
    {"activation": "swiglu", "moe_capacity_factor": 0.7},
    {"activation": "swiglu", "moe_router_score": "sigmoid", "moe_bias_balancing_rate": 0.1},
    {"activation": "swiglu", "moe_top_k": 1},
    {"activation": "swiglu", "moe_top_k": 5, "moe_normalize_topk": True},
]


TWO = Context(torch.arange(6).expand(2, 6))  # two sequences of six tokens


def _layer(**changes: Any) -> MixtureOfExperts:
    layer = MixtureOfExperts(tiny(**{**KEYS, **changes}), ParallelState.single())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return layer.double()


def _network(x: Tensor, first: Tensor, second: Tensor, name: str, biases: tuple[Any, Any] = (0.0, 0.0)) -> Tensor:
    wide = first @ x + biases[0]
    if name in ("swiglu", "geglu"):
        up, gate = wide.chunk(2)
        wide = ACT[name](gate) * up
    else:
        wide = ACT[name](wide)
    return second @ wide + biases[1]


def _written_out(layer: MixtureOfExperts, x: Tensor, sequences: int, changes: dict[str, Any]) -> Tensor:
    """Everything once more, token by token."""
    router, experts, name = layer.router, layer.experts, changes["activation"]
    scores = x @ router.weight.T
    scores = scores.sigmoid() if changes.get("moe_router_score") == "sigmoid" else scores.softmax(-1)
    bias = router.expert_bias.double() if router.expert_bias is not None else 0.0
    chosen = (scores + bias).topk(router.top_k).indices
    most, length = math.inf, len(x) // sequences
    if (factor := changes.get("moe_capacity_factor")) is not None:
        most = math.ceil(factor * length * router.top_k / 5)
    rows = []
    for token, row in enumerate(x):
        if token % length == 0:
            taken = [0] * 5
        weights = scores[token, chosen[token]]
        if changes.get("moe_normalize_topk"):
            weights = weights / weights.sum()
        total = torch.zeros_like(row)
        for j, expert in enumerate(chosen[token].tolist()):
            taken[expert] += 1
            if taken[expert] <= most:
                biases = (experts.bias1[expert], experts.bias2[expert]) if experts.bias1 is not None else (0.0, 0.0)
                weight = weights[j] * changes.get("moe_routed_scaling", 1.0)
                total = total + weight * _network(row, experts.linear1[expert], experts.linear2[expert], name, biases)
        if (shared := layer.shared_expert) is not None:
            always = _network(row, shared.linear1.weight, shared.linear2.weight, name)
            gate = layer.shared_expert_gate
            total = total + always * (1.0 if gate is None else (row @ gate.weight[0]).sigmoid())
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("changes", FORMS, ids=str)
def test_output_and_gradients(changes: dict[str, Any]) -> None:
    layer = _layer(**changes)
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    out, loss = layer(x, TWO)
    expected = _written_out(layer, x, 2, changes)
    assert loss is None
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)  # the router is fp32
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    push = torch.randn(12, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad((out * push).sum(), inputs),
        torch.autograd.grad((expected * push).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_evaluation_drops_nothing() -> None:
    layer = _layer(activation="swiglu", moe_capacity_factor=0.5)
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    trained, evaluated = layer(x, TWO)[0], layer.eval()(x, TWO)[0]
    assert not torch.allclose(trained, evaluated)
    torch.testing.assert_close(evaluated, _written_out(layer, x, 2, {"activation": "swiglu"}), rtol=1e-5, atol=1e-5)


def test_the_losses_are_weighted_and_added() -> None:
    layer = _layer(activation="swiglu", moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.25)
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out, loss = layer(x, TWO)
    out.sum().backward()
    *chosen, dropped, balance, z, micro_batches = layer.load.take().tolist()
    assert sum(chosen) == 12 * 3 and dropped == 0 and micro_batches == 1
    assert loss.item() == pytest.approx(0.5 * balance + 0.25 * z)


def test_experts_are_initialised_one_by_one() -> None:
    """Fan-in and fan-out of an expert are its own matrix's; each differs."""
    from megatron.mpu import initial_weights, sharding

    layer = MixtureOfExperts(tiny(**KEYS, init_method="xavier_uniform"), ParallelState.single())
    sharding.bind(layer, 2)
    initial_weights.initialize(layer, 1, ParallelState.single())
    first = layer.experts.linear1
    bound = (6 / (32 + 12)) ** 0.5
    assert 0.95 * bound < first.abs().amax((1, 2)).min() and first.abs().max() <= bound
    assert not torch.equal(first[0], first[1])
