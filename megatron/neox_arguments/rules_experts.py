"""Rules about expert parallelism."""

from __future__ import annotations

import math

from megatron.neox_arguments.draft import Draft


def expert_parallel(draft: Draft) -> None:
    """Consecutive data-parallel ranks share experts, whole ones, in an engine that can keep them apart."""
    draft.positive("expert_parallel_size")
    expert, data, tensor = (draft[f"{axis}_parallel_size"] for axis in ("expert", "data", "model"))
    if expert == 1:
        return
    experts = draft["moe_num_experts"]
    if "moe" not in draft["layer_mlps"]:
        draft.fail(
            "expert_parallel_size", f"{expert} ranks have no experts to share: moe_num_experts is {experts}; use 1"
        )
    possible = _divisors(math.gcd(data, experts // tensor if experts % tensor == 0 else 1))
    if data % expert:
        draft.fail("expert_parallel_size", f"{expert} does not divide data_parallel_size {data}; use {possible}")
    if experts % (expert * tensor):
        draft.fail(
            "expert_parallel_size",
            f"moe_num_experts {experts} cannot be split over expert_parallel_size {expert} x model_parallel_size"
            f" {tensor} = {expert * tensor} ranks; use {possible}",
        )
    if draft["engine"] == "deepspeed":
        _deepspeed(draft, expert)


def _divisors(number: int) -> str:
    return " or ".join(str(i) for i in range(1, number + 1) if number % i == 0)


def _deepspeed(draft: Draft, expert: int) -> None:
    """DeepSpeed keeps experts apart without ZeRO, and in bfloat16 with the masters of stage 1."""
    precision, stage = draft["precision"], draft["zero_stage"]
    otherwise = "or expert_parallel_size: 1 (model_parallel_size divides the experts too, with any ZeRO stage)"
    if precision == "fp16":
        draft.fail("expert_parallel_size", f"{expert} does not work with fp16; use precision: bfloat16, {otherwise}")
    most = 1 if precision == "bfloat16" else 0
    if stage > most:
        draft.fail(
            "zero_stage" if draft.is_set("zero_stage") else "zero_optimization.stage",
            f"stage {stage} does not work with expert_parallel_size {expert} in {precision}; use stage {most},"
            f" {otherwise}",
        )
    if precision != "bfloat16":
        return
    kind = (draft["data_types"] or {}).get("grad_accum_dtype", "fp32")
    if kind != "fp32":
        draft.fail(
            "data_types.grad_accum_dtype",
            f"{kind} does not work with expert_parallel_size {expert}; use fp32, {otherwise}",
        )
    if (draft["zero_optimization"] or {}).get("offload_optimizer"):
        draft.fail(
            "zero_optimization.offload_optimizer",
            f"does not work with expert_parallel_size {expert}; leave it out, {otherwise}",
        )
