"""What `train_impl` needs: a head, data, a batch."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.data.reference import REFERENCE
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import check_trainable, derive
from megatron.neox_arguments.rules_reference import reads_reference
from megatron.rows import rows
from megatron.training.setup import build_objective

pytestmark = pytest.mark.cpu

RUN: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "train_micro_batch_size_per_gpu": 2,
    "train_iters": 4,
}
PAIRS = {
    "train_impl": "rm",
    "dataset_impl": "pairwise",
    "pack_impl": "unpacked",
    "pos_train_data_paths": ["good"],
    "neg_train_data_paths": ["bad"],
}
REWARDS = {
    "train_impl": "kto",
    "pack_impl": "unpacked",
    "train_data_paths": ["texts"],
    "train_label_data_paths": ["labels"],
    "train_reward_data_paths": ["rewards"],
}


MIXED = {"sources": {"judged": {"path": "a", "labels": "l", "rewards": "r"}, "plain": {"path": "b", "labels": "l"}}}
REWARDS_MIXED = {"train_impl": "kto", "pack_impl": "unpacked"}
EXPERTS = {"moe_num_experts": 4}
TOLD = {"train_impl": "distill", "data_path": "x", "distill_teacher": "large", "distill_precompute": True}
NPO = {"ga_mode": "interleaved", "data_path": "texts", "ga_dataset": "others", "ga_loss": "npo"}
GRPO = {
    "train_impl": "grpo",
    "rollout_prompts": "p.jsonl",
    "reward": "exact",
    "rollouts_per_prompt": 2,
    "rollout_tokens": 8,
}


def trainable(**keys: Any) -> NeoXArgs:
    args = derive(NeoXArgs.from_saved({**RUN, **keys}))
    check_trainable(args)
    return args


def test_a_reward_model_has_a_head_of_rewards() -> None:
    assert trainable(**PAIRS).model.output_head == "reward"
    assert trainable(**REWARDS).model.output_head == "vocabulary"
    assert not trainable(**PAIRS).model.ties_head


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({**PAIRS, "eval_tasks": ["lambada"]}, "eval_tasks: .*no words"),
        ({**PAIRS, "sample_every": 2, "sample_prompts": "p.txt"}, "sample_every: .*no words"),
        ({**PAIRS, "z_loss_weight": 0.1}, "z_loss_weight: .*z_loss"),
        ({**PAIRS, "eod_mask_loss": True}, "eod_mask_loss: .*set it false"),
        ({"train_impl": "rm", "train_data_paths": ["texts"]}, "rm learns from pairs: .*pos_train_data_paths"),
        ({"train_impl": "rm"}, "rm learns from pairs: .*pos_train_data_paths"),
        ({**PAIRS, "train_impl": "kto"}, "kto learns from texts with a reward each: .*dataset_impl: gpt2"),
        ({"train_impl": "kto", "data_path": "texts"}, "kto learns from texts with a reward each"),
        ({**REWARDS, "valid_data_paths": ["more"]}, "valid_reward_data_paths: "),
        ({**REWARDS, "valid_sets": {"new": "more", "old": {"path": "x", "rewards": "r"}}}, "valid_sets.new.rewards: "),
        ({**REWARDS_MIXED, "mixture": MIXED}, "train_reward_data_paths: plain has none"),
        (
            {**REWARDS_MIXED, "kto_loss_type": "apo_zero_unpaired", "mixture": MIXED},
            "reward_data_paths: plain has none",
        ),
        ({**REWARDS, "train_label_data_paths": None}, "labels.*train_label_data_paths"),
        ({**REWARDS, "pack_impl": "best_fit", "intra_document_masking": True}, "pack_impl: unpacked, or kto_loss_type"),
        ({**REWARDS, "precompute_model_name": "ref"}, "precompute_model_name .*leave it out"),
        ({**REWARDS, "train_micro_batch_size_per_gpu": 1}, "train_batch_size: 1 .*2 or more, or kto_loss_type"),
        ({**REWARDS, "kto_beta": 0.0}, "kto_beta"),
        ({**PAIRS, "rm_center_coefficient": -1.0}, "rm_center_coefficient"),
        ({**REWARDS, **EXPERTS}, r"moe_router_type: sinkhorn \(the default\) .*set moe_router_type: topk"),
        ({**NPO, **EXPERTS, "moe_router_type": "topk", "moe_jitter_eps": 0.1}, "moe_jitter_eps: .*reference model"),
        ({**GRPO, **EXPERTS, "moe_router_type": "topk", "moe_capacity_factor": 1.5}, "moe_capacity_factor: .*complet"),
        ({**TOLD, "distill_teacher": None}, "distill_teacher"),
        ({**TOLD, "distill_top_k": 0}, "distill_top_k: 0 would keep the whole vocabulary"),
        ({**TOLD, "seq_length_ramp": {"start": 8, "steps": 2}}, "seq_length_ramp: .*distill_precompute"),
        ({**TOLD, "distill_layers": [0, 1]}, "distill_layers: is for objectives of plugins"),
        ({**NPO, "seq_length_ramp": {"start": 8, "steps": 2}}, "seq_length_ramp: .*whole rows.*ga_loss: simnpo"),
    ],
)
def test_what_an_objective_cannot_do_is_named(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        trainable(**keys)


@pytest.mark.parametrize("name", [name for name in rows("train_impl") if name != "normal"])
def test_a_z_loss_is_refused_where_the_loss_has_none(name: str) -> None:
    """`token_loss` adds none; distill would scale it by the share of the cross entropy, and forgetting raise it."""
    more = {"ga_dataset": "x", "ga_mode": "interleaved"} if name == "unlearn" else {}
    with pytest.raises(UserError, match=f"z_loss_weight: is not for the loss of train_impl: {name}; leave it out"):
        derive(NeoXArgs.from_saved({**RUN, "train_impl": name, "z_loss_weight": 1e-4, **more}))


def test_without_an_estimate_kto_takes_what_the_data_are() -> None:
    free = {**REWARDS, "kto_loss_type": "apo_zero_unpaired"}
    trainable(**{**free, "train_micro_batch_size_per_gpu": 1, "train_label_data_paths": None})
    trainable(**{**free, "pack_impl": "best_fit", "intra_document_masking": True})


def test_a_reference_hears_no_dropout() -> None:
    """Said once, with the keys, where log-probabilities are compared with others; and routers may differ elsewhere."""
    drops = {"hidden_dropout": 0.1, "lora_r": 2, "lora_dropout": 0.2}
    dpo = {**PAIRS, "train_impl": "dpo"}
    for keys in (dpo, REWARDS, NPO, GRPO):
        (note,) = (note for note in trainable(**keys, **drops).notes if "dropout" in note)
        assert note.startswith("hidden_dropout, lora_dropout: ")
    for keys in ({**dpo, "dpo_loss_type": "simpo"}, {**dpo, "dpo_reference_free": True}, {**NPO, "ga_loss": "simnpo"}):
        assert not [note for note in trainable(**keys, **drops, **EXPERTS).notes if "dropout" in note]


@pytest.mark.parametrize("keys", [REWARDS, NPO, {**NPO, "ga_loss": "simnpo"}, {**PAIRS, "train_impl": "dpo"}, PAIRS])
def test_the_rules_know_what_reads_a_reference(keys: dict[str, Any]) -> None:
    args = trainable(**keys)
    assert reads_reference(args.get) == (REFERENCE in build_objective(args).reads)


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({**PAIRS, "kto_beta": 0.5}, "kto_beta has no effect with train_impl: rm"),
        ({"dpo_beta": 0.5}, "dpo_beta has no effect with train_impl: normal"),
        ({"distill_top_k": 3}, "distill_top_k has no effect with train_impl: normal"),
        ({**PAIRS, "train_impl": "dpo", "dpo_fp32": False}, "dpo_fp32 has no effect: log-probabilities are always"),
        ({**PAIRS, "rm_center_coefficient": 0.5}, None),
        ({**PAIRS, "train_impl": "dpo", "dpo_fp32": True, "dpo_beta": 0.5}, None),
    ],
    ids=str,
)
def test_keys_that_nothing_reads_are_said(keys: dict[str, Any], note: str | None) -> None:
    """A resolved config names every key, which says nothing."""
    notes = [one for one in derive(NeoXArgs.from_saved({**RUN, **keys})).notes if "has no effect" in one]
    assert any(note in one for one in notes) if note else not notes
