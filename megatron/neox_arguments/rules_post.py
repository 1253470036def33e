"""Rules for training that begins with a trained model: adapters, teachers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.neox_arguments.draft import Draft
from megatron.rows import row

_OF_ADAPTERS = ("lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora", "lora_save_base")


def adapters(draft: Draft) -> None:
    """A rank with the keys that describe adapters, and values that mean something."""
    if draft["lora_r"] is None:
        for name in _OF_ADAPTERS:
            if draft.is_changed(name):
                draft.report(name, "describes adapters, and there are none: set lora_r, their rank")
        return
    draft.positive("lora_r", "lora_alpha")
    draft.check(lambda share: 0 <= share < 1, "must be 0 or more and less than 1", "lora_dropout")
    if draft["te_layernorm_mlp"]:
        draft.report("lora_r", "te_layernorm_mlp reads the weights of layers that have adapters; set it to false")
    if not draft["lora_target_modules"]:
        draft.report("lora_target_modules", "names no layer; use all-linear, or names such as query_key_value")


def has_teacher(value: Callable[[str], Any]) -> bool:
    """Whether the objective learns from a teacher."""
    return row("train_impl", value("train_impl")).get("data") == "teacher"


def distillation(draft: Draft) -> None:
    """A teacher, and numbers that mean something."""
    if not has_teacher(draft.__getitem__):
        return
    draft.require("distill_teacher")
    if draft["distill_layers"] is not None:
        if draft["train_impl"] == "distill":
            draft.report("distill_layers", "is for objectives of plugins; train_impl: distill reads no hidden states")
        elif draft["distill_precompute"]:
            draft.report("distill_precompute", "keeps the likeliest tokens, not hidden states (distill_layers)")
    if draft["distill_precompute"]:
        if draft["distill_top_k"] == 0:
            draft.report("distill_top_k", "0 would keep the whole vocabulary for each token; set 64, or so")
        if draft["seq_length_ramp"]:
            draft.report("seq_length_ramp", "the teacher reads whole rows beforehand (distill_precompute)")
    draft.positive("distill_temperature")
    draft.not_negative("distill_top_k", zero=" (all)")
    draft.check(lambda share: 0 < share <= 1, "must be above 0 and at most 1", "distill_weight")
    draft.check(lambda share: 0 < share < 1, "must be above 0 and below 1", "distill_jsd_beta")
