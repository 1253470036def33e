"""The head of a reward model: one number for each token, alike on every tensor-parallel rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model.head import RewardOutput
from megatron.mpu.sharding import named_parameters, unshard
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments.formulas import parameter_count
from tests.distributed import run_distributed
from tests.model.networks import LLAMA, PHI, VOCAB, batch, build, tiny

pytestmark = pytest.mark.cpu

FORMS: list[dict[str, Any]] = [
    LLAMA,
    {"no_weight_tying": False},
    PHI,  # its bias belongs to logits
    {"use_mup": True, "mup_base_hidden_size": 8},
]
PLACES = torch.tensor([15, 20])


def reward_model(changes: dict[str, Any], state: ParallelState | None = None):
    return build(tiny(**changes, train_impl="rm", init_method_std=0.3), state, padding=80)


@pytest.mark.parametrize("changes", FORMS, ids=str)
def test_rewards_are_products_with_one_vector(changes: dict[str, Any]) -> None:
    network = reward_model(changes)
    names = dict(named_parameters(network))
    assert [name for name in names if name.startswith("6.")] == ["6.rm_linear.weight"]
    real = sum(p.numel() for p in names.values()) - (80 - VOCAB) * 32
    assert parameter_count(tiny(**changes, train_impl="rm"), VOCAB).total == real
    tokens, positions, _ = batch()
    out = network((tokens, positions))
    assert isinstance(out, RewardOutput)
    expected = (out.hidden.double() @ names["6.rm_linear.weight"].double().T).squeeze(1)
    expected /= 4 if changes.get("use_mup") else 1
    assert expected.std() > 0.1
    assert (out.rewards() - expected).abs().max() < 1e-5
    assert (out.rewards(PLACES) - expected[PLACES]).abs().max() < 1e-5
    assert (out.logits().flatten() - expected).abs().max() < 1e-5


def test_rewards_are_in_fp32_where_the_model_is_in_bf16() -> None:
    network = reward_model(LLAMA).bfloat16()
    tokens, positions, _ = batch()
    out = network((tokens, positions))
    expected = out.hidden.double() @ out.weight.double().T
    assert (out.rewards() - expected.squeeze(1)).abs().max() < 1e-5


def _step(changes: dict[str, Any], state: ParallelState) -> tuple[Tensor, dict[str, Tensor]]:
    network = reward_model(changes, state)
    tokens, positions, _ = batch()
    found = network((tokens, positions)).rewards(PLACES)
    (found * torch.tensor([1.0, -0.7])).sum().backward()
    return found.detach(), {name: p.grad for name, p in named_parameters(network)}


def _steps(rank: int, world: int, sequence_parallel: bool) -> list[tuple[Tensor, dict[str, Tensor]]]:
    topology = Topology({"pipe": 1, "data": 1, "model": world})
    state = ParallelState.build(topology, rank, torch.device("cpu"), sequence_parallel)
    return [_step(changes, state) for changes in FORMS[:2]]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_are_equal_to_one(sequence_parallel: bool) -> None:
    ranks = run_distributed(_steps, 2, sequence_parallel, timeout=90)
    for i, changes in enumerate(FORMS[:2]):
        found, gradients = _step(changes, ParallelState.single())
        specs = {name: p.spec for name, p in named_parameters(reward_model(changes))}
        for rank in ranks:
            assert (rank[i][0] - found).abs().max() < 1e-5
        for name, expected in gradients.items():
            whole = unshard([rank[i][1][name] for rank in ranks], specs[name])
            expected = expected.narrow(0, 0, specs[name].shape[0])
            assert (whole - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1), (changes, name)
        assert gradients["6.rm_linear.weight"].abs().max() > 0.01
