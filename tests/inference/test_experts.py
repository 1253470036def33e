"""Texts of a mixture of experts: the same whoever holds the experts, and each rank holds its share of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.inference.team import Control, Team
from tests.distributed import run_distributed
from tests.inference.models import (
    GPT_LLAMA,
    GPT_NEOX,
    PROMPTS,
    Layout,
    complete,
    make_checkpoint,
    stage_of,
    state_of,
)

pytestmark = pytest.mark.cpu

EXPERTS = {"moe_num_experts": 8, "moe_router_type": "topk", "moe_top_k": 2, "moe_intermediate_size": 24}
MODELS = {"llama": {**GPT_LLAMA, **EXPERTS, "moe_shared_expert_size": 16}, "neox": {**GPT_NEOX, **EXPERTS}}
LAYOUTS = [
    ("llama", Layout(dp=2, ep=2)),
    ("llama", Layout(dp=2, tp=2, ep=2)),
    ("neox", Layout(pp=2, dp=2, ep=2)),
    ("neox", Layout(dp=4, ep=4)),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """`checkpoint(name)`: the folder of a model, written once, by two expert-parallel ranks."""
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            folders[name] = make_checkpoint(tmp_path_factory.mktemp(name), MODELS[name], Layout(dp=2, ep=2))
        return folders[name]

    return make


def generated(rank: int, world: int, folder: Path, keys: dict[str, Any], layout: Layout) -> Any:
    stage = stage_of(folder, keys, layout, rank)
    experts = {
        name: (p.shape[0], p.untyped_storage().nbytes() == p.numel() * p.element_size())
        for layer in stage.layers
        for name, p in layer.named_parameters()
        if p.spec.experts
    }
    return [done.tokens for done in complete(stage)], [d.tokens for d in complete(stage, use_cache=False)], experts


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=lambda x: getattr(x, "name", x))
def test_same_text_whoever_holds_the_experts(checkpoint, model: str, layout: Layout) -> None:
    keys, folder = MODELS[model], checkpoint(model)
    expected = [done.tokens for done in complete(stage_of(folder, keys))]
    assert len({token for tokens in expected for token in tokens}) >= 6  # no model that says one thing
    for cached, uncached, experts in run_distributed(generated, layout.world, folder, keys, layout):
        assert cached == uncached == expected
        assert set(experts.values()) == {(8 // (layout.ep * layout.tp), True)}, "a rank holds its experts alone"


def asked(rank: int, world: int, folder: Path, layout: Layout) -> list[Any]:
    state = state_of(rank, layout)
    stage = stage_of(folder, MODELS["neox"], layout, rank)

    def work(items: Sequence[tuple[list[int], int]], options: Mapping[str, Any]) -> list[list[int]]:
        return [complete(stage, [prompt], tokens=length)[0].tokens for prompt, length in items]

    found: list[Any] = []
    team = Team(Control(state), stage, {"complete": work})
    team.run(lambda: found.extend(team.ask("complete", ITEMS, {})))
    return found


ITEMS = [(PROMPTS[0], 9), (PROMPTS[1], 2), (PROMPTS[2], 5)]


@pytest.mark.parametrize("layout", [Layout(dp=4, ep=2), Layout(dp=2, ep=2)], ids=lambda x: x.name)
def test_copies_of_the_model_work_on_texts_of_their_own(checkpoint, layout: Layout) -> None:
    """Copies have different numbers of texts of different lengths; the ranks of one copy stay together."""
    folder = checkpoint("neox")
    stage = stage_of(folder, MODELS["neox"])
    expected = [complete(stage, [prompt], tokens=length)[0].tokens for prompt, length in ITEMS]
    results = run_distributed(asked, layout.world, folder, layout)
    assert results[0] == expected
    assert all(not found for found in results[1:])
