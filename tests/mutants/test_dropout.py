"""Dropout has no reference of one rank, but a rule: which ranks draw the same masks. Mutants of it are seen, too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.layers import dropout
from megatron.layers.dropout import hidden_dropout, sharded_rng
from megatron.mpu import random as mpu_random
from megatron.mpu.random import seed_everything, stable_seed
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology

pytestmark = pytest.mark.cpu

TOPOLOGY = Topology({"pipe": 2, "data": 2, "model": 2})


def masks(state: ParallelState) -> dict[str, Tensor]:
    """What a rank draws for hidden states, for its own heads, and for hidden states behind them."""
    seed_everything(42, state)
    x = torch.ones(64)
    found = {"mask of hidden states": hidden_dropout(x, 0.5, True, state)}
    with sharded_rng(0.5, state):
        found["mask of own heads"] = F.dropout(x, 0.5)
    found["later mask of hidden states"] = hidden_dropout(x, 0.5, True, state)
    return found


def wrong(sequence_parallel: bool) -> list[str]:
    """Which pairs of ranks draw the same mask though they see other things, or other ones though they see the same."""
    states = [ParallelState(TOPOLOGY, rank, torch.device("cpu"), sequence_parallel) for rank in range(8)]
    drawn, found = [masks(state) for state in states], []
    for one, other in combinations(range(8), 2):
        a, b = states[one], states[other]
        replicas = not sequence_parallel and (a.dp_rank, a.pp_rank) == (b.dp_rank, b.pp_rank)
        for what in drawn[one]:
            same = torch.equal(drawn[one][what], drawn[other][what])
            if same != (replicas and "hidden" in what):
                found.append(f"{what}: {'the same' if same else 'not the same'} on ranks {one} and {other}")
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_rule_holds(sequence_parallel: bool) -> None:
    assert wrong(sequence_parallel) == []


def _seeded(*kept: str) -> Any:
    """Default generators seeded with some of a rank's coordinates."""

    def seed(number: int, state: ParallelState) -> None:
        torch.manual_seed(stable_seed(number, *(getattr(state, name) for name in kept)))

    return mock.patch(f"{__name__}.seed_everything", seed)


def same_on_data_ranks() -> Any:
    """Data ranks drop the same entries of different samples."""
    return _seeded("pp_rank")


def same_on_stages() -> Any:
    """Layers of different stages drop the same entries."""
    return _seeded("dp_rank")


def different_on_replicas() -> Any:
    """Tensor-parallel ranks drop different entries of the same hidden states: replicas drift apart."""
    return _seeded("pp_rank", "dp_rank", "tp_rank")


def same_on_heads() -> Any:
    """Different heads drop the same entries."""
    return mock.patch.object(mpu_random, "stable_seed", lambda *parts: stable_seed(*parts[:2]))


def same_on_slices() -> Any:
    """Different slices of a sequence drop the same entries."""

    def hidden(x: Tensor, probability: float, training: bool, state: ParallelState) -> Tensor:
        return F.dropout(x, probability)

    return mock.patch(f"{__name__}.hidden_dropout", hidden)


def generator_left_apart() -> Any:
    """Behind a region in which ranks differ they do not agree again."""

    def region(state: ParallelState) -> Any:
        torch.manual_seed(stable_seed(0, state.tp_rank))
        return mock.MagicMock()

    return mock.patch.object(dropout, "tensor_parallel_rng", region)


@pytest.mark.parametrize(
    ("mistake", "sequence_parallel", "shows"),
    [
        (same_on_data_ranks, False, "mask of hidden states: the same on ranks 0 and 2"),
        (same_on_stages, False, "mask of own heads: the same on ranks 0 and 4"),
        (different_on_replicas, False, "mask of hidden states: not the same on ranks 0 and 1"),
        (same_on_heads, False, "mask of own heads: the same on ranks 0 and 1"),
        (same_on_slices, True, "mask of hidden states: the same on ranks 0 and 1"),
        (generator_left_apart, False, "later mask of hidden states: not the same on ranks 0 and 1"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_mistake_is_seen(mistake: Callable[[], Any], sequence_parallel: bool, shows: str) -> None:
    with mistake():
        assert shows in wrong(sequence_parallel)
