"""Rules about precision, optimizer, checkpoints and evaluation."""

from __future__ import annotations

import math
from typing import Any

from megatron.errors import UserError, nearest
from megatron.neox_arguments import rules_schedule
from megatron.neox_arguments.draft import SET_BY_PROGRAM, Draft
from megatron.neox_arguments.groups import all_keys
from megatron.neox_arguments.nested import dtype_name
from megatron.neox_arguments.optimizer_params import KIND, optimizer_params
from megatron.neox_arguments.parameter_rules import parse_rules
from megatron.neox_arguments.rules_mixture import has_valid_sets
from megatron.neox_arguments.rules_parallel import stages
from megatron.neox_arguments.rules_rollouts import trains_on_rollouts
from megatron.rows import row


def precision(draft: Draft) -> None:
    """One precision from `precision` and the fp16 and bf16 mappings, which must not contradict each other."""
    half, brain = draft["fp16"] or {}, draft["bf16"] or {}
    by_dict = None
    if half.get("enabled"):
        by_dict = ("fp16", "fp16.enabled")
        if str(half.get("type", "")).lower() in ("bfloat16", "bf16"):
            by_dict = ("bfloat16", "fp16.type")
            draft.note(f"{draft.source('fp16')}: fp16.type bfloat16 is read as precision: bfloat16")
    if brain.get("enabled"):
        if by_dict is not None and by_dict[0] == "fp16":
            draft.fail("bf16.enabled", f"fp16 is enabled too ({draft.source('fp16.enabled')}); enable one of the two")
        by_dict = ("bfloat16", "bf16.enabled")
    stated = draft.get_given("precision")
    if stated and by_dict and stated != by_dict[0] and draft.source("precision") != SET_BY_PROGRAM:
        draft.fail("precision", f"is {stated}, but {by_dict[1]} ({draft.source(by_dict[1])}) asks for {by_dict[0]}")
    chosen = stated or (by_dict[0] if by_dict else "fp32")
    if not stated and by_dict:
        draft.sources["precision"] = draft.source(by_dict[1])
    draft.set("precision", chosen, "neither fp16 nor bf16 is enabled")
    if draft["fp16"] is not None:
        kept = {name: value for name, value in half.items() if name != "type"}
        draft.set("fp16", {**kept, "enabled": chosen == "fp16"}, "precision")
    if draft["bf16"] is not None:
        draft.set("bf16", {**brain, "enabled": chosen == "bfloat16"}, "precision")


def gradient_accumulation_type(draft: Draft) -> None:
    """data_types.grad_accum_dtype in one spelling; unset means fp32."""
    inner = (draft["data_types"] or {}).get("grad_accum_dtype")
    if inner is None:
        return
    name = dtype_name(inner)
    if name not in ("fp32", "bf16", "fp16"):
        draft.fail("data_types.grad_accum_dtype", f"{inner!r} is not one of: fp32, bf16, fp16")
    draft.set("data_types", {**draft["data_types"], "grad_accum_dtype": name}, "spelling")


def optimizer(draft: Draft) -> None:
    """optimizer_type, lr, betas, eps, momentum and weight_decay from the optimizer mapping."""
    draft.not_negative("gradient_clipping", zero=" (no clipping)")
    mapping = draft["optimizer"] or {}
    params = mapping.get("params") or {}
    with draft.part():
        _learning_rate(draft, params.get("lr"))
    with draft.part():
        _weight_decay(draft, params.get("weight_decay"))
    with draft.part():
        try:
            parse_rules(draft["parameter_groups"])
        except UserError as problem:
            draft.fail("parameter_groups", str(problem))
    _optimizer_type(draft, mapping.get("type"))
    if draft["weight_decay"] and row(KIND, draft["optimizer_type"]).get("decays") is False:
        draft.note(f"weight_decay has no effect: {draft['optimizer_type']} has none, as in GPT-NeoX")
    used = optimizer_params(draft["optimizer_type"], mapping)
    for name in sorted(params.keys() - used.keys() - {"lr", "weight_decay"}):
        draft.note(f"optimizer.params.{name} has no effect: {draft['optimizer_type']} does not have it")
    for name in ("betas", "eps", "momentum"):
        value = used.get(name)
        draft.set(name, tuple(value) if isinstance(value, list) else value, f"optimizer.params.{name}")
    if not all(0 <= beta < 1 for beta in draft["betas"] or ()):
        draft.fail("optimizer.params.betas", f"must be in [0, 1), are {list(draft['betas'])}")
    for name, limit in (("eps", math.inf), ("momentum", 1)):
        if draft[name] is not None and not 0 <= draft[name] < limit:
            draft.fail(f"optimizer.params.{name}", f"must be in [0, {limit}), is {draft[name]}")
    if not 0 <= used.get("beta", 0) < 1:
        draft.fail("optimizer.params.beta", f"must be in [0, 1), is {used['beta']}")
    weight_of_average = draft["betas"][0] if draft["betas"] else draft["momentum"]
    if row(KIND, draft["optimizer_type"]).get("averages") and not weight_of_average:
        name = "betas" if draft["betas"] else "momentum"
        draft.fail(
            f"optimizer.params.{name}", f"{draft['optimizer_type']} needs one above 0: the weight of the average"
        )
    if used.get("nesterov") and not draft["momentum"]:
        draft.fail("optimizer.params.nesterov", "needs a momentum above 0")


def _learning_rate(draft: Draft, inner: float | None) -> None:
    rate = draft.get_given("lr")
    if rate is not None and inner is not None and rate != inner:
        where = draft.source("optimizer.params.lr")
        draft.fail("lr", f"is {rate}, but optimizer.params.lr is {inner} ({where}); keep one of the two")
    rate = rate if rate is not None else inner
    rate = 0.001 if rate is None else rate
    if rate < 0:  # 0 is GPT-NeoX's way to evaluate only
        draft.fail("lr" if draft.is_set("lr") else "optimizer.params.lr", f"must be 0 or more, is {rate}")
    draft.set("lr", rate, "optimizer.params.lr" if inner is not None else "default 0.001")


def _optimizer_type(draft: Draft, inner: str | None) -> None:
    info = all_keys()["optimizer_type"]
    unavailable = {name: info.refusal(name) for name in info.choices if info.refusal(name) is not None}
    stated = draft.get_given("optimizer_type")
    chosen = info.default
    if inner is not None:
        spellings = {**info.spellings, **{name.lower(): name for name in info.added}}
        chosen = spellings.get(inner.lower(), inner.lower())
        usable = [name for name in info.choices if name not in unavailable]
        if chosen in unavailable:
            draft.fail("optimizer.type", f"{inner} is not available: {unavailable[chosen]}")
        if chosen not in usable:
            hint = nearest(chosen, usable)
            draft.fail("optimizer.type", f"{inner!r} is not known.{hint} Choices: {', '.join(usable)}")
        if stated is not None and stated != chosen:
            draft.fail(
                "optimizer_type", f"is {stated}, but optimizer.type is {inner} ({draft.source('optimizer.type')})"
            )
    draft.set("optimizer_type", stated or chosen, "optimizer.type")


def _weight_decay(draft: Draft, inner: float | None) -> None:
    stated = draft.get_given("weight_decay")
    if inner is not None:
        if stated is not None and stated != inner:
            where = draft.source("optimizer.params.weight_decay")
            draft.fail("weight_decay", f"is {stated}, but optimizer.params.weight_decay is {inner} ({where})")
        if stated is None and inner != draft["weight_decay"]:
            draft.note(f"weight_decay is {inner}, from optimizer.params; GPT-NeoX would use weight_decay's default 0.1")
        draft.set("weight_decay", inner, "optimizer.params.weight_decay")
    draft.not_negative("weight_decay")


def zero(draft: Draft) -> None:
    """zero_stage: 0-3; bfloat16 and fp16 need 1; 2 and 3 do not work with a pipeline."""
    mapping = draft["zero_optimization"] or {}
    stated, inner = draft.get_given("zero_stage"), mapping.get("stage")
    if stated is not None and inner is not None and stated != inner:
        where = draft.source("zero_optimization.stage")
        draft.fail("zero_stage", f"is {stated}, but zero_optimization.stage is {inner} ({where}); keep one of the two")
    stage = stated if stated is not None else inner or 0
    name = "zero_stage" if stated is not None else "zero_optimization.stage"
    if stage not in (0, 1, 2, 3):
        draft.fail(name, f"must be 0, 1, 2 or 3, is {stage}")
    if stage >= 2 and stages(draft) > 1:
        draft.fail(
            name, f"stage {stage} does not work with pipe_parallel_size {stages(draft)}; use stage 1 or no pipeline"
        )
    if draft["precision"] in ("bfloat16", "fp16") and stage == 0:
        draft.note(f"ZeRO stage 1 is used: {draft['precision']} keeps its fp32 masters and gradients there")
        stage = 1
    stage = _offloads(draft, mapping, stage)
    tensor = draft["model_parallel_size"]
    if draft["optimizer_type"] == "sm3" and stage:
        draft.note(
            "SM3 sees no rows and columns in ZeRO's flat pieces: each weight keeps a sum of its own, as in GPT-NeoX"
        )
    elif draft["optimizer_type"] == "sm3" and tensor > 1:
        draft.note(
            f"SM3 takes the maxima of rows and columns over one tensor-parallel rank's shard: with {tensor} of them "
            "losses differ from those of another model_parallel_size"
        )
    set_stage(draft, stage, "zero_optimization.stage, at least 1 with bfloat16 and fp16")


def _offloads(draft: Draft, mapping: dict[str, Any], stage: int) -> int:
    """Optimizer state in the host's memory from stage 1 on, parameters in stage 3. The stage to use."""
    for name in ("offload_optimizer", "offload_param"):
        device = (mapping.get(name) or {}).get("device", "none")
        if device == "nvme":
            draft.fail(
                f"zero_optimization.{name}",
                "on nvme nothing could clip gradients or read checkpoints' state; use device: cpu",
            )
        if device == "none":
            continue
        if name == "offload_param" and stage < 3:
            draft.fail(f"zero_optimization.{name}", f"needs ZeRO stage 3, zero_stage is {stage}")
        if stages(draft) > 1:
            draft.fail(
                f"zero_optimization.{name}", f"does not work with pipe_parallel_size {stages(draft)}; leave it out"
            )
        if stage == 0:
            draft.note("ZeRO stage 1 is used: offload_optimizer needs it")
            stage = 1
    return stage


def set_stage(draft: Draft, stage: int, why: str) -> None:
    """Write the stage in both places; one that the user gave otherwise is no longer his."""
    mapping = draft["zero_optimization"]
    if draft["zero_stage"] != stage:
        draft.sources.pop("zero_stage", None)
    if mapping is not None and mapping.get("stage", stage) != stage:
        for name in ("zero_optimization", "zero_optimization.stage"):
            draft.sources.pop(name, None)
    draft.set("zero_stage", stage, why)
    if mapping is not None:
        draft.set("zero_optimization", {**mapping, "stage": stage}, why)


def communication_type(draft: Draft) -> None:
    """fp32 unless the user names another type, or says that he wants the model's: fp32_allreduce: false.

    Left to DeepSpeed, sums of gradients in fp32 would travel, and be added up, in the model's type.
    """
    kind = draft.get_given("communication_data_type")
    if draft.get_given("fp32_allreduce") and kind not in (None, "fp32"):
        draft.fail("communication_data_type", f"is {kind}, but fp32_allreduce is set; keep one of the two")
    of_model = {"bfloat16": "bf16", "fp16": "fp16"}.get(draft["precision"], "fp32")
    draft.set("communication_data_type", kind or ("fp32" if draft["fp32_allreduce"] else of_model), "fp32_allreduce")


def engine_limits(draft: Draft) -> None:
    """Keys that are passed to DeepSpeed and that it cannot do in every layout."""
    stage = draft["zero_stage"]
    draft.positive("gradient_predivide_factor")
    for name, off in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
        if draft[name] != off and stage >= 2:
            draft.fail(name, f"does not work with ZeRO stage {stage}; leave it at {off} or use stage 1")
    if stages(draft) > 1:
        if (draft["flops_profiler"] or {}).get("enabled"):
            draft.fail("flops_profiler", "does not work with a pipeline; profile one stage (pipe_parallel_size: 0)")
        if draft["wall_clock_breakdown"]:
            draft.note("wall_clock_breakdown is off: DeepSpeed's timers stop the run when there is a pipeline")
            draft.set("wall_clock_breakdown", False, "pipe_parallel_size")


def checkpoints(draft: Draft) -> None:
    """Spacing of checkpoints."""
    draft.not_negative("iteration")
    factor = draft["checkpoint_factor"]
    if factor is not None and factor > 0:
        if draft["checkpoint_scale"] == "log" and factor < 1.01:
            draft.fail("checkpoint_factor", f"must be at least 1.01 with checkpoint_scale: log, is {factor}")
        if draft["checkpoint_scale"] == "linear" and factor != int(factor):
            draft.fail("checkpoint_factor", f"must be a whole number of steps, is {factor}")
    if any(step < 0 for step in draft["extra_save_iters"] or ()):
        draft.fail("extra_save_iters", "steps must not be negative")
    if draft["save"] and not draft["extra_save_iters"] and not (factor and factor > 0):
        draft.note("checkpoints are saved at the end only: checkpoint_factor is not set")


def _are_counts(value: Any) -> bool:
    numbers = value.values() if isinstance(value, dict) else [value]
    return all(type(number) is int and number >= 0 for number in numbers)


def evaluation(draft: Draft) -> None:
    """What the run does: training, validation, test; the kind of text generation."""
    draft.not_negative("eval_iters", zero=" (no evaluation)")
    draft.not_negative("temperature", "top_p", "top_k", "maximum_tokens", "num_samples")
    draft.positive("eval_task_limit", "eval_batch_size")
    draft.check(_are_counts, "whole numbers of at least 0 are expected", "eval_num_fewshot")
    draft.check(lambda value: 0 <= value < 2**32, "must be in [0, 2^32)", "seed")
    if draft["chat_system"] is not None and not draft["chat"]:
        draft.report("chat_system", "chat is off, so there is no chat to begin with it; set chat: true")
    with draft.part():
        asked = "prompt" if draft["prompt"] else "sample_input_file"
        kind = "input-file" if draft[asked] else "unconditional"
        draft.set("text_gen_type", draft.get_given("text_gen_type") or kind, asked)
    one_path = draft["data_path"] is not None
    evaluates = draft["eval_iters"] > 0
    trains = any(draft[name] for name in rules_schedule.LENGTHS)
    found = {
        "do_train": trains
        and (one_path or draft["train_data_paths"] is not None or trains_on_rollouts(draft.__getitem__)),
        "do_valid": evaluates and (one_path or draft["valid_data_paths"] is not None or has_valid_sets(draft)),
        "do_test": evaluates and (one_path or draft["test_data_paths"] is not None),
    }
    if draft.get_given("do_train") is False and found["do_train"]:
        draft.fail("do_train", "is false, but there are steps to train; to validate and test only, set train_iters: 0")
    for name, value in found.items():
        stated = draft.get_given(name)
        draft.set(name, value if stated is None else stated and value, "whether there are steps and data for it")
    if draft["top_p"] > 1:
        draft.fail("top_p", f"is a probability, not {draft['top_p']}")
