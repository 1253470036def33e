"""What the dry run says of mixtures of experts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plan.test_planner import dry_run, rows, section

pytestmark = pytest.mark.cpu

MOE = (
    "moe_num_experts=8",
    "moe_router_type=topk",
    "moe_top_k=2",
    "moe_layers=[[[dense],1],[[moe],5]]",
    "moe_intermediate_size=24",
    "moe_shared_expert_size=16",
)


def test_experts_and_what_a_token_uses(run_config: Path) -> None:
    lines = section(dry_run(run_config, *MOE), "model")
    facts = re.compile(r".*\b5 of 6 layers: 8 experts .*\b24 .*\b16, 2 per token \(topk, none .*\)")
    assert any(map(facts.fullmatch, lines))
    (parameters,) = (line for line in lines if line.startswith("parameters "))
    total = int(parameters.split()[1].replace(",", ""))
    (active,) = (line for line in lines if line.startswith("of which a token uses"))
    assert total - int(active.split()[5].replace(",", "")) == 5 * 6 * (2 * 24 * 32)  # 6 of 8 idle, two matrices each


def test_capacity_is_shown_and_a_dense_model_shows_none(run_config: Path) -> None:
    assert "capacity factor 1.25)" in dry_run(run_config, *MOE, "moe_capacity_factor=1.25")
    assert "experts" not in dry_run(run_config)


def test_a_rank_holds_whole_experts(run_config: Path) -> None:
    held = {}
    for tensor in (1, 2):
        text = dry_run(run_config, *MOE, f"model_parallel_size={tensor}", f"num_gpus={tensor}")
        ((_, _, _, local, *_),) = rows(text, "stages", "stage")
        held[tensor] = int(local.replace(",", ""))
    experts = 5 * 8 * 2 * 24 * 32
    assert held[1] - held[2] > experts // 2  # half of the experts, and of everything else that is split
