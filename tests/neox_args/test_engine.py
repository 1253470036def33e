"""`engine: native`: what it refuses, what it makes of ZeRO's stage, and which keys it says to have no effect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import UserError
from megatron.neox_arguments.derive import Facts
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp16"}, "engine: native .*fp16; use precision: bfloat16, or engine: deepspeed"),
        ({"pipe_parallel_size": 2}, "engine: .*pipe_parallel_size is 2; use 1, or engine: deepspeed"),
        ({"zero_stage": 3}, "engine: .*ZeRO stage 3 .*use stage 1, or engine: deepspeed"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "engine: .*leave out zero_optimization.offload_optimizer, or engine: deepspeed",
        ),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "engine: .*leave out data_types.grad_accum_dtype bf16"),
        ({"communication_data_type": "bf16"}, "engine: .*leave out communication_data_type bf16"),
        ({"precision": "bfloat16", "fp32_allreduce": False}, "engine: .*leave out fp32_allreduce: false, or"),
    ],
)
def test_what_deepspeed_alone_does_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    derived(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        derived(tmp_path, engine="native", **changes)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("precision", "ranks", "effective"), [("fp32", 1, 0), ("fp32", 2, 1), ("bfloat16", 1, 1), ("bfloat16", 2, 1)]
)
def test_the_optimizer_is_divided_whatever_the_stage(
    stage: int, precision: str, ranks: int, effective: int, tmp_path: Path
) -> None:
    facts = Facts(vocab_size=100, num_devices=ranks)
    zero = {"zero_optimization": {"stage": stage}}
    args = derived(tmp_path, facts=facts, engine="native", precision=precision, **zero)
    assert args.optimizer.zero_stage == args.optimizer.zero_optimization["stage"] == effective
    assert args.deepspeed.communication_data_type == "fp32"
    notes = [re.findall(r"\b[0-9]\b", note) for note in args.notes if "ZeRO" in note]
    if stage == effective:
        assert notes == [] and args.source("zero_optimization.stage").startswith(str(tmp_path))
    else:
        assert notes == ([["1"]] if precision == "bfloat16" and stage == 0 else [[f"{stage}", f"{effective}"]])
        for name in ("zero_optimization", "zero_optimization.stage", "zero_stage"):
            assert args.source(name).startswith("derived")


def test_experts_go_with_every_stage_of_it(tmp_path: Path) -> None:
    keys = {"moe_num_experts": 8, "moe_router_type": "topk", "expert_parallel_size": 2, "zero_stage": 2}
    facts = Facts(vocab_size=100, num_devices=4)
    with pytest.raises(UserError, match="zero_stage: stage 2"):
        derived(tmp_path, facts=facts, **keys)
    assert derived(tmp_path, facts=facts, engine="native", **keys).optimizer.zero_stage == 1


def test_keys_that_deepspeed_alone_reads_are_named(tmp_path: Path) -> None:
    keys = {"dump_state": True, "comms_logger": {"enabled": True}, "flops_profiler": {"enabled": False}}
    named = [note.split()[0] for note in derived(tmp_path, engine="native", **keys).notes if "engine: native" in note]
    assert named == ["dump_state", "comms_logger"]
    assert not [note for note in derived(tmp_path, **keys).notes if "engine" in note]
