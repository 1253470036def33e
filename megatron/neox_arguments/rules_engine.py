"""Rules about the native engine: what it does not do is refused, keys that it does not read are named."""

from __future__ import annotations

from collections.abc import Callable

from megatron.neox_arguments.draft import Draft
from megatron.neox_arguments.optimizer_params import KIND, optimizer_params
from megatron.neox_arguments.rules_parallel import stages
from megatron.neox_arguments.rules_rollouts import trains_on_rollouts
from megatron.neox_arguments.rules_train import set_stage
from megatron.rows import row

_OR = "or engine: deepspeed"
_MUON_CHOICES = {"adjust_lr_fn": ("match_rms_adamw", "original"), "split_qkv": ("matrices", "groups", "heads")}
_ADAFACTOR_LIMITS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("beta2_decay", lambda value: value <= 0, "0 or less"),
    ("d", lambda value: value >= 1, "1 or more"),
    ("eps1", lambda value: value > 0, "above 0"),
    ("eps2", lambda value: value >= 0, "0 or more"),
)
# Keys that DeepSpeed alone reads, with the value that asks for nothing.
_DEEPSPEED_READS = {
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "wall_clock_breakdown": False,
    "dump_state": False,
    "flops_profiler": None,
    "comms_logger": None,
    "tensorboard": None,
    "wandb": None,
    "csv_monitor": None,
    "deepspeed_extra_args": None,
}


def layout_free(draft: Draft) -> None:
    """deterministic: layout is the native engine without anything that depends on which rank does what."""
    if draft["deterministic"] != "layout":
        return
    if draft.get_given("engine") == "deepspeed":
        draft.fail("deterministic", "layout needs engine: native; leave out engine: deepspeed")
    for name in ("attention_dropout", "hidden_dropout", "embedding_dropout", "lora_dropout"):
        if draft[name]:
            draft.report("deterministic", f"layout knows no dropout, each rank draws its own; set {name}: 0")
    if trains_on_rollouts(draft.__getitem__):
        draft.report(
            "deterministic",
            f"layout: the completions of train_impl: {draft['train_impl']} are written in batches that depend on the "
            "layout; set deterministic: true",
        )
    if draft["expert_parallel_size"] > 1:
        draft.report("deterministic", "layout keeps experts whole; set expert_parallel_size: 1")
    draft.imply("engine", "native", "deterministic")


def whole_matrices(draft: Draft) -> None:
    """An optimizer of whole matrices runs where ranks have them, or can put them together for a step: without ZeRO, and
    with the ranges of the native engine and of bfloat16 at stage 1."""
    kind = draft["optimizer_type"]
    if not row(KIND, kind).get("matrices"):
        return
    params, stage = optimizer_params(kind, draft["optimizer"]), draft["zero_stage"]
    for name, choices in _MUON_CHOICES.items():
        if (chosen := params.get(name, choices[0])) not in choices:
            draft.fail(f"optimizer.params.{name}", f"{chosen!r} is not one of: {', '.join(choices)}")
    if not 1 <= (steps := params.get("ns_steps", 1)) <= 100:
        draft.fail("optimizer.params.ns_steps", f"must be 1 to 100, is {steps}")
    for name, fits, said in _ADAFACTOR_LIMITS:
        if name in params and not fits(params[name]):
            draft.fail(f"optimizer.params.{name}", f"must be {said}, is {params[name]}")
    needs = f"{kind} needs whole matrices"
    if row(KIND, kind)["matrices"] == "all":
        if "moe" in (draft["layer_mlps"] or ()):
            draft.fail("optimizer.type", f"{kind} knows no experts, each a matrix of its own; use adamw or muon")
        if draft["deterministic"] == "layout":
            draft.fail("optimizer.type", f"{kind} adds up over ranks in an order of theirs; use adamw or muon")
    if draft["use_mup"]:
        draft.fail(
            "optimizer.type", f"{kind} scales the updates of a matrix by itself, as use_mup does; use one of both"
        )
    if draft["precision"] == "fp16":
        draft.fail("optimizer.type", f"{needs}, which ZeRO cuts in fp16; use precision: bfloat16")
    if (draft["zero_optimization"] or {}).get("offload_optimizer"):
        draft.fail("optimizer.type", f"{needs} on the device; leave out zero_optimization.offload_optimizer")
    if draft["engine"] == "native":
        return
    if stage >= 2:
        draft.fail("optimizer.type", f"{needs}, which ZeRO stage {stage} cuts; use stage 1, or engine: native")
    sums = (draft["data_types"] or {}).get("grad_accum_dtype", "fp32")
    if draft["precision"] == "bfloat16" and sums != "fp32":
        draft.fail("optimizer.type", f"{needs}, which ZeRO cuts with data_types.grad_accum_dtype {sums}; use fp32")
    if draft["precision"] == "fp32" and stage == 1 and (draft["data_parallel_size"] or 1) > 1:
        draft.fail("optimizer.type", f"{needs}, which ZeRO stage 1 cuts in fp32; use stage 0, or engine: native")


def curvature(draft: Draft) -> None:
    """An optimizer that estimates the curvature from targets drawn from the model: of next tokens, and of nothing that
    is added to their loss."""
    kind = draft["optimizer_type"]
    if not row(KIND, kind).get("curvature"):
        return
    params = optimizer_params(kind, draft["optimizer"])
    for name, least in (("hessian_interval", 1), ("rho", 0.0)):
        if name in params and params[name] < least:
            draft.fail(f"optimizer.params.{name}", f"must be {least} or more, is {params[name]}")
    draws = f"{kind} draws next tokens from the model"
    if draft["train_impl"] != "normal":
        draft.fail("optimizer.type", f"{draws}; with train_impl {draft['train_impl']} use adamw")
    if draft["z_loss_weight"]:
        draft.fail("optimizer.type", f"{draws}, whose curvature z_loss_weight would change; leave it out or use adamw")
    if "moe" in (draft["layer_mlps"] or ()):
        draft.fail("optimizer.type", f"{draws} in passes that mixtures of experts would count as well; use adamw")


def repeatable(draft: Draft) -> None:
    """deterministic: no kernel whose sums come in another order each time. Those of other packages for Mamba add up
    gradients so; torch computes the same without them."""
    if not draft["deterministic"]:
        return
    for name in ("mamba_selective_scan_fusion", "mamba_causal_conv_fusion", "mamba_inner_func_fusion"):
        if draft.get_given(name):
            draft.report("deterministic", f"the kernel of {name} is not; leave that out")
        draft.imply(name, False, "deterministic")


def native_engine(draft: Draft) -> None:
    """engine: native trains one stage in fp32 or bfloat16, adds up in fp32, and always divides the optimizer's state
    over the data-parallel ranks: ZeRO stage 1, whichever of 0, 1 and 2 was asked for."""
    if draft["engine"] != "native":
        return
    with draft.part():
        if draft["precision"] == "fp16":
            draft.fail("engine", f"native does not train in fp16; use precision: bfloat16, {_OR}")
    with draft.part():
        if stages(draft) > 1:
            draft.fail("engine", f"native is one stage, pipe_parallel_size is {stages(draft)}; use 1, {_OR}")
    zero = draft["zero_optimization"] or {}
    with draft.part():
        if draft["zero_stage"] == 3:
            draft.fail("engine", f"native keeps weights whole, which ZeRO stage 3 divides; use stage 1, {_OR}")
    with draft.part():
        offloads = [f"zero_optimization.{name}" for name in ("offload_optimizer", "offload_param") if zero.get(name)]
        if offloads:
            draft.fail("engine", f"native keeps everything on the device; leave out {' and '.join(offloads)}, {_OR}")
    with draft.part():
        kind = (draft["data_types"] or {}).get("grad_accum_dtype", "fp32")
        if kind != "fp32":
            draft.fail("engine", f"native adds up in fp32; leave out data_types.grad_accum_dtype {kind}, {_OR}")
    with draft.part():
        kind = draft.get_given("communication_data_type")
        if kind not in (None, "fp32"):
            draft.fail("engine", f"native reduces in fp32; leave out communication_data_type {kind}, {_OR}")
    with draft.part():
        if draft["precision"] != "fp32" and draft.get_given("fp32_allreduce") is False:
            draft.fail("engine", f"native reduces in fp32; leave out fp32_allreduce: false, {_OR}")
    for name, nothing in _DEEPSPEED_READS.items():
        value = draft[name]
        if draft.is_set(name) and value != nothing and not (isinstance(value, dict) and value.get("enabled") is False):
            draft.note(f"{name} has no effect with engine: native; DeepSpeed alone reads it")
    if draft["zero_stage"] < 3:
        divided = draft["data_parallel_size"] > 1 or draft["precision"] != "fp32"
        stage = int(divided)
        if stage != draft["zero_stage"] and (draft.is_set("zero_stage") or draft.is_set("zero_optimization")):
            draft.note(
                f"ZeRO stage {draft['zero_stage']} becomes {stage}: engine: native divides the optimizer's state"
            )
        set_stage(draft, stage, "engine: native")
