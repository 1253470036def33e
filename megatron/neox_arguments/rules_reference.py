"""Rules about runs whose loss compares with log-probabilities made beforehand: of a reference model, or of the sampler
that wrote completions. Both are made as in evaluation, of whole rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.neox_arguments.draft import Draft
from megatron.neox_arguments.rules_rollouts import keeps_reference, trains_on_rollouts

_DROPOUTS = ("hidden_dropout", "attention_dropout", "embedding_dropout", "lora_dropout")


def pairs_compare(value: Callable[[str], Any]) -> bool:
    """Whether `train_impl: dpo` compares with a reference model, by its keys."""
    return not value("dpo_reference_free") and value("dpo_loss_type") not in ("simpo", "orpo")


def reads_reference(value: Callable[[str], Any]) -> bool:
    """Whether the objective compares with the model that the run begins with on texts that exist before."""
    objective = value("train_impl")
    if objective == "dpo":
        return pairs_compare(value)
    return objective == "kto" or (objective == "unlearn" and value("ga_loss") == "npo")


def exchanges(value: Callable[[str], Any]) -> bool:
    """Whether the objective also compares prompts with the answers to others (KTO's z0)."""
    return value("train_impl") == "kto" and value("kto_loss_type") == "kto"


def reference(draft: Draft) -> None:
    """The model that is trained is the one that is compared with, but for its weights."""
    if trains_on_rollouts(draft.__getitem__):
        before = "completions are written and scored"
    elif reads_reference(draft.__getitem__):
        before = "the reference model is read"
    elif keeps_reference(draft.__getitem__):
        before = "the model that the run began with is read"
    else:
        return
    if drops := [name for name in _DROPOUTS if draft[name] and (name != "lora_dropout" or draft["lora_r"])]:
        draft.note(
            f"{', '.join(drops)}: {before} without dropout and the model is trained with it, which adds to ratios"
        )
    if "moe" in draft["layer_mlps"]:
        if draft["moe_router_type"] == "sinkhorn":
            source = "set" if draft.is_set("moe_router_type") else "the default"
            draft.report(
                "moe_router_type",
                f"sinkhorn ({source}) balances in training only, and {before} without; set moe_router_type: topk",
            )
        for name in ("moe_jitter_eps", "moe_capacity_factor"):
            if draft[name]:
                draft.report(
                    name, f"changes the choice of experts in training only, and {before} without; leave it out"
                )
    if draft["ga_loss"] == "npo" and draft["train_impl"] == "unlearn" and draft["seq_length_ramp"]:
        draft.report(
            "seq_length_ramp", f"{before} with whole rows, and this cuts them; leave it out, or set ga_loss: simnpo"
        )
