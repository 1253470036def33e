"""Layers to pipeline stages."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence

import pytest

from megatron.errors import UserError
from megatron.model.partition import layer_parameters, layer_rows, partition, stage_table
from megatron.mpu.sharding import named_parameters
from tests.model.networks import LLAMA, NEOX, VOCAB, build, tiny

pytestmark = pytest.mark.cpu


def _blocks(layers: int, stages: int, method: str, parameters: list[int] | None = None) -> list[int]:
    """Blocks per stage."""
    rows = layer_rows(tiny(num_layers=layers))
    bounds = partition(rows, stages, method, parameters)
    assert bounds[0] == 0
    assert bounds[-1] == len(rows)
    return [sum(row.is_block for row in rows[start:stop]) for start, stop in itertools.pairwise(bounds)]


@pytest.mark.parametrize(
    ("layers", "stages", "method", "expected"),
    [
        (6, 2, "type:transformer|mlp", [3, 3]),
        (24, 4, "type:transformer|mlp", [6, 6, 6, 6]),
        (6, 4, "type:transformer|mlp", [2, 2, 1, 1]),
        (7, 3, "type:Transformer", [3, 2, 2]),
        (5, 1, "type:transformer", [5]),
        (4, 4, "uniform", [1, 1, 1, 1]),
        (7, 3, "uniform", [3, 3, 1]),
        (6, 3, "type:embedding|transformer|head", [2, 3, 1]),
        (9, 4, "explicit:3,3,2,1", [3, 3, 2, 1]),
    ],
)
def test_counts(layers: int, stages: int, method: str, expected: list[int]) -> None:
    assert _blocks(layers, stages, method) == expected


def test_parameters_makes_room_for_a_large_vocabulary() -> None:
    assert _blocks(8, 4, "parameters", [300, *[100] * 8, 1, 300]) == [1, 3, 3, 1]
    assert _blocks(8, 4, "parameters", [0, *[100] * 8, 0, 0]) == [2, 2, 2, 2]


def _heaviest(counts: Sequence[int], weights: tuple[int, int, int]) -> int:
    """Load of the heaviest stage; weights of what is before, of each, and of what is after the blocks."""
    first, each, last = weights
    loads = [count * each for count in counts]
    loads[0] += first
    loads[-1] += last
    return max(loads)


@pytest.mark.parametrize("method", ["type:transformer|mlp", "uniform", "parameters"])
def test_the_heaviest_stage_is_as_light_as_any_split_allows(method: str) -> None:
    """Against all splits, for every small case; and every stage owns a block."""
    for layers, stages in itertools.product(range(1, 8), range(1, 5)):
        if layers < stages:
            continue
        weights = {"uniform": (1, 1, 2), "parameters": (7, 3, 5)}.get(method, (0, 1, 0))
        first, each, last = weights
        parameters = [first, *[each] * layers, 0, last]

        def heaviest(
            counts: tuple[int, ...] | list[int], each: int = each, first: int = first, last: int = last
        ) -> int:
            loads = [count * each for count in counts]
            loads[0] += first
            loads[-1] += last
            return max(loads)

        counts = _blocks(layers, stages, method, parameters)
        assert min(counts) >= 1
        assert sum(counts) == layers
        splits = (c for c in itertools.product(range(1, layers + 1), repeat=stages) if sum(c) == layers)
        assert _heaviest(counts, weights) == min(_heaviest(split, weights) for split in splits)


@pytest.mark.parametrize(
    ("layers", "stages", "method", "message"),
    [
        (2, 4, "type:transformer|mlp", "pipe_parallel_size: 4 stages for num_layers=2"),
        (4, 2, "type:mamba", "Embedding, TransformerBlock, FinalNorm, Head"),
        (4, 2, "type:(", "not a regular expression"),
        (4, 2, "profile", "not known; use type:"),
        (4, 2, "explicit:3,2", "2 stages with 5 blocks"),
        (4, 2, "explicit:4,0", "each at least 1"),
        (4, 3, "explicit:2,2", "2 stages with 4 blocks"),
    ],
)
def test_refusals(layers: int, stages: int, method: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        _blocks(layers, stages, method)
    assert message in str(caught.value)


def test_stage_table() -> None:
    rows = layer_rows(tiny(num_layers=3))
    table = stage_table(rows, partition(rows, 2, "type:transformer"), [50, 10, 10, 10, 1, 50])
    assert [[row.index for row in stage.layers] for stage in table] == [[0, 2, 3], [4, 6, 7]]
    assert [stage.parameters for stage in table] == [70, 61]


FORMS = [
    NEOX,
    LLAMA,
    {"pos_emb": "learned", "use_qk_layernorm": True},
    {"gpt_j_residual": True, "gpt_j_tied": True},
    {"norm_placement": "olmo3", "norm": "rmsnorm", "use_qk_layernorm": True, "use_separate_qk_norms": True},
    {"norm_placement": "sandwich", "norm": "rmsnorm", "use_separate_qk_norms": True, "qk_norm_per_head": True},
]


@pytest.mark.parametrize("changes", FORMS, ids=str)
def test_parameters_per_layer_are_those_of_the_model(changes: dict[str, object]) -> None:
    model = tiny(**changes)
    network = build(model)
    counted = dict.fromkeys((row.index for row in layer_rows(model)), 0)
    for name, parameter in named_parameters(network):
        size = 1
        for n in parameter.spec.shape:
            size *= n
        counted[int(name.partition(".")[0])] += size
    expected = layer_parameters(model, VOCAB)
    if not model.no_weight_tying:
        counted[6] = VOCAB * 32
    assert list(counted.values()) == expected


def test_needs_no_torch() -> None:
    code = "import sys, megatron.model.partition; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
