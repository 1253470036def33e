"""Dropout under tensor parallelism: different where tensors are split, alike where they are replicated."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.mpu.random import seed_everything, tensor_parallel_rng
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology

pytestmark = pytest.mark.cpu

TOPOLOGY = Topology({"pipe": 2, "data": 2, "model": 2})
STATES = [ParallelState(TOPOLOGY, rank, torch.device("cpu")) for rank in range(8)]


def masks(state: ParallelState) -> tuple[Tensor, Tensor, Tensor]:
    """Dropout before, inside and after the region that is split."""
    x = torch.ones(64)
    before = F.dropout(x)
    with tensor_parallel_rng(state):
        inside = F.dropout(x)
    return before, inside, F.dropout(x)


def test_dropout_agrees_outside_and_differs_inside() -> None:
    """Known fault 85, for dropout. Ranks differing only in `model` are neighbours: 0 and 1, 2 and 3, ..."""
    drawn = []
    for state in STATES:
        seed_everything(42, state)
        drawn.append(masks(state))
    for one, other in zip(drawn[::2], drawn[1::2]):
        assert torch.equal(one[0], other[0]) and torch.equal(one[2], other[2])
        assert not torch.equal(one[1], other[1])
    inside = torch.stack([mask[1] for mask in drawn])
    assert len(inside.unique(dim=0)) == 8  # nor do data-parallel ranks or stages share a mask
    assert len(torch.stack([mask[0] for mask in drawn]).unique(dim=0)) == 4


def test_successive_regions_differ() -> None:
    seed_everything(42, STATES[1])
    assert not torch.equal(masks(STATES[1])[1], masks(STATES[1])[1])


def test_an_error_inside_leaves_the_generator_in_step() -> None:
    after = []
    for state in STATES[:2]:
        seed_everything(42, state)
        with pytest.raises(KeyError), tensor_parallel_rng(state):
            torch.rand(3 + state.rank)
            raise KeyError
        after.append(torch.rand(4))
    assert torch.equal(*after)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_repeats_the_masks(use_reentrant: bool) -> None:
    """If it did not, the gradient would belong to another function: here it must be y / x wherever y is not 0."""
    state = STATES[1]
    seed_everything(42, state)

    def block(x: Tensor) -> Tensor:
        with tensor_parallel_rng(state):
            x = F.dropout(x, 0.5)
        return F.dropout(x, 0.2)

    x = (torch.rand(256) + 1).requires_grad_()
    y = checkpoint(block, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert 0 < y.count_nonzero() < 256
    torch.testing.assert_close(x.grad, (y / x).detach())


def test_resuming_needs_the_default_generators_only() -> None:
    seed_everything(42, STATES[1])
    masks(STATES[1])
    saved = torch.get_rng_state()
    expected = masks(STATES[1])
    torch.manual_seed(0)
    torch.set_rng_state(saved)
    assert all(torch.equal(a, b) for a, b in zip(masks(STATES[1]), expected))


def test_one_rank_draws_from_the_default_generator() -> None:
    state = ParallelState.single()
    seed_everything(1, state)
    with tensor_parallel_rng(state):
        inside = torch.rand(3)
    seed_everything(1, state)
    assert torch.equal(inside, torch.rand(3))


def test_every_generator_is_seeded() -> None:
    def draw(seed: int, state: ParallelState) -> tuple[float, float, float]:
        seed_everything(seed, state)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draw(1, STATES[0]) == draw(1, STATES[0]) == draw(1, STATES[1])
    for a, b in zip(draw(1, STATES[0]), draw(2, STATES[0])):
        assert a != b
    for a, b in zip(draw(1, STATES[0]), draw(1, STATES[2])):
        assert a != b
