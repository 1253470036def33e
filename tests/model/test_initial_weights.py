"""Ranks that hold the same network draw its initial weights together: the same values, each drawn once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from torch import Tensor, nn

from megatron.model.gpt import gpt_layers
from megatron.model.pipe import LayerPipe
from megatron.mpu import initial_weights
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.objectives import OBJECTIVES
from tests.distributed import run_distributed
from tests.model.networks import LLAMA, SEED, VOCAB, build, padded, tiny
from tests.model.test_moe import EVERYTHING

pytestmark = pytest.mark.cpu

FORMS: list[dict[str, Any]] = [
    {"pos_emb": "learned"},  # tied, with a table that every tensor-parallel rank has whole
    {**LLAMA, "num_layers": 3},
    EVERYTHING,
]


def weights(
    form: dict[str, Any], state: ParallelState, make: Callable[..., nn.Module] = build
) -> tuple[dict[str, Tensor], int]:
    """The network's parameters, and how many random numbers were drawn for them."""
    sizes: list[int] = []
    draw = Tensor.normal_

    def count(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sizes.append(tensor.numel())
        return draw(tensor, *args, **kwargs)

    # The noise that the helper adds to biases is no part of this.
    with mock.patch("tests.model.networks.randomise_vectors"), mock.patch.object(Tensor, "normal_", count):
        network = make(tiny(**form), state, padding=80)
    return {name: value.detach().clone() for name, value in named_parameters(network)}, sum(sizes)


def on_ranks(rank: int, world: int, tp: int, ep: int, form: dict[str, Any]) -> tuple[int, int, list[str]]:
    """(numbers drawn together, by a rank alone, what differs) for every rank."""
    topology = Topology({"pipe": 1, "data": world // tp, "model": tp})
    together = ParallelState.build(topology, rank, "cpu", ep_size=ep)
    alone = ParallelState(topology, rank, torch.device("cpu"), ep_size=ep)
    expected, all_numbers = weights(form, alone)
    with (
        mock.patch.object(initial_weights, "WORTH_SENDING", 1),
        mock.patch.object(torch, "get_num_threads", lambda: 3),
    ):
        found, numbers = weights(form, together)
    assert list(found) == list(expected)
    return numbers, all_numbers, [name for name, value in found.items() if not torch.equal(value, expected[name])]


LAYOUTS = [(FORMS[0], 4, 2, 1), (FORMS[1], 4, 2, 1), (FORMS[1], 2, 1, 1), (EVERYTHING, 4, 2, 2), (EVERYTHING, 4, 1, 2)]


@pytest.mark.parametrize(("form", "world", "tp", "ep"), LAYOUTS)
def test_the_same_values_each_drawn_once(form: dict[str, Any], world: int, tp: int, ep: int) -> None:
    ranks = run_distributed(on_ranks, world, tp, ep, form)
    assert [differs for _, _, differs in ranks] == [[]] * world
    once = weights(form, ParallelState.single())[1]
    assert sum(numbers for numbers, _, _ in ranks) == once
    assert all(0 < numbers < 0.6 * alone for numbers, alone, _ in ranks)


def stage(model: ModelConfig, state: ParallelState, padding: int) -> LayerPipe:
    layers = gpt_layers(model, vocab_size=VOCAB, padded_vocab_size=padded(padding), state=state)
    return LayerPipe(layers, OBJECTIVES["normal"](), "type:transformer|mlp", SEED, state)


def on_stages(rank: int, world: int) -> tuple[int, list[str]]:
    """(numbers drawn, what differs from the whole network of one process) for every rank of two stages."""
    expected, _ = weights(FORMS[0], ParallelState.single())
    state = ParallelState.build(Topology({"pipe": 2, "data": world // 2, "model": 1}), rank, "cpu")
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    with mock.patch.object(initial_weights, "WORTH_SENDING", 1):
        found, numbers = weights(FORMS[0], state, stage)
    return numbers, [name for name, value in found.items() if not torch.equal(value, expected[name])]


def test_stages_draw_their_own_layers_together() -> None:
    ranks = run_distributed(on_stages, 4)
    assert [differs for _, differs in ranks] == [[]] * 4
    # The tied embedding is on both stages.
    numbers = weights(FORMS[0], ParallelState.single())[1] + VOCAB * 32
    assert sum(numbers for numbers, _ in ranks) == numbers
    assert all(drawn < 0.4 * numbers for drawn, _ in ranks)


def numbers_of_a_small_network(rank: int, world: int) -> int:
    return weights({}, ParallelState.build(Topology({"pipe": 1, "data": world, "model": 1}), rank, "cpu"))[1]


def test_small_parameters_are_not_sent() -> None:
    assert run_distributed(numbers_of_a_small_network, 2) == [weights({}, ParallelState.single())[1]] * 2


def test_work_is_dealt_evenly() -> None:
    """The largest first, each to who has least; nobody twice."""
    sizes = [4, 9, 1, 7, 3, 5, 5, 2]
    hands = initial_weights.deal(sizes, 3)
    assert sorted(number for hand in hands for number in hand) == list(range(8))
    assert [sum(sizes[number] for number in hand) for hand in hands] == [12, 12, 12]
    assert initial_weights.deal([5, 5], 4) == [[0], [1], [], []]
