"""Expert parallelism: which divisions of experts and which engines go, and what else to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import UserError
from megatron.neox_arguments.derive import Facts
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu

EXPERTS = {"moe_num_experts": 8, "moe_router_type": "topk"}
WAY_OUT = r"or expert_parallel_size: 1 \(model_parallel_size divides the experts too, with any ZeRO stage\)"


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"expert_parallel_size": 0}, 4, "expert_parallel_size: must be above 0, is 0"),
        (
            {"expert_parallel_size": 3},
            4,
            "expert_parallel_size: 3 .*data_parallel_size 4; use 1 or 2 or 4$",
        ),
        (
            {"expert_parallel_size": 4, "moe_num_experts": 6},
            4,
            r"\b6 .*expert_parallel_size 4 x model_parallel_size 1 = 4 ranks; use 1 or 2$",
        ),
        (
            {"expert_parallel_size": 4, "model_parallel_size": 4},
            16,
            r"expert_parallel_size 4 x model_parallel_size 4 = 16 ranks; use 1 or 2$",
        ),
        (
            {"expert_parallel_size": 2, "moe_num_experts": 1, "moe_router_type": None},
            4,
            "expert_parallel_size: 2 .*moe_num_experts is 1; use 1$",
        ),
        (
            {"expert_parallel_size": 2, "zero_optimization": {"stage": 1}},
            4,
            rf"optimization.stage: stage 1 .*expert_parallel_size 2 .*fp32; use stage 0, {WAY_OUT}$",
        ),
        (
            {"expert_parallel_size": 2, "zero_stage": 2, "precision": "bfloat16"},
            4,
            rf"zero_stage: stage 2 .*expert_parallel_size 2 .*bfloat16; use stage 1, {WAY_OUT}$",
        ),
        (
            {"expert_parallel_size": 2, "precision": "fp16"},
            4,
            rf"expert_parallel_size: 2 .*fp16; use precision: bfloat16, {WAY_OUT}$",
        ),
        (
            {"expert_parallel_size": 2, "precision": "bfloat16", "data_types": {"grad_accum_dtype": "bf16"}},
            4,
            rf"data_types.grad_accum_dtype: bf16 .*expert_parallel_size 2; use fp32, {WAY_OUT}$",
        ),
        (
            {
                "expert_parallel_size": 2,
                "precision": "bfloat16",
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
            },
            4,
            rf"offload_optimizer: .*expert_parallel_size 2; .*{WAY_OUT}$",
        ),
    ],
)
def test_refusals_say_what_goes(tmp_path: Path, changes: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        derived(tmp_path, facts=Facts(num_devices=ranks), **{**EXPERTS, **changes})


@pytest.mark.parametrize(
    ("changes", "ranks", "stage"),
    [
        ({"expert_parallel_size": 4, "model_parallel_size": 2}, 8, 0),
        ({"expert_parallel_size": 2, "pipe_parallel_size": 2}, 8, 0),
        ({"expert_parallel_size": 2, "precision": "bfloat16"}, 4, 1),
        ({"precision": "bfloat16", "zero_optimization": {"stage": 3}}, 4, 3),  # experts are divided like all else
    ],
)
def test_what_goes(tmp_path: Path, changes: dict[str, Any], ranks: int, stage: int) -> None:
    args = derived(tmp_path, facts=Facts(num_devices=ranks), **EXPERTS, **changes)
    assert args.optimizer.zero_stage == stage
    assert args.parallel.data_parallel_size % args.parallel.expert_parallel_size == 0


def test_ranks_that_share_experts_are_started_when_nothing_says_how_many(tmp_path: Path) -> None:
    args = derived(tmp_path, **EXPERTS, expert_parallel_size=4, model_parallel_size=2)
    assert (args.parallel.world_size, args.parallel.data_parallel_size) == (8, 4)
