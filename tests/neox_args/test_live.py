"""A live key is read: by a rule that changes a derived value, or by the code above the configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.neox_arguments import rules_pairs
from megatron.neox_arguments.groups import all_keys
from megatron.neox_arguments.mixtures import COMPANIONS
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]

# Keys that only make other values: a change of the key, what else has to be set, and the value that changes with it.
RULED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "intermediate_size": (96, {}, "ffn_width"),
    "expansion_factor": (2, {}, "ffn_width"),
    "mlp_multiple_of": (48, {}, "ffn_width"),
    "gated_width_rule": ("final", {"activation": "swiglu"}, "ffn_width"),
    "activation": ("geglu", {}, "ffn_width"),
    "mup_base_hidden_size": (16, {"use_mup": True}, "mup_width_mult"),
    "checkpoint_activations": (True, {}, "checkpoint_policy"),
    "sliding_window_width": (8, {}, "layer_windows"),
    "moe_expert_interval": (2, {"moe_num_experts": 4}, "layer_mlps"),
    "opt_pos_emb_offset": (2, {}, "max_position_embeddings"),
    "optimizer": ({"type": "sgd"}, {}, "optimizer_type"),
    "fp16": ({"enabled": True}, {}, "precision"),
    "bf16": ({"enabled": True}, {}, "precision"),
    "zero_optimization": ({"stage": 2}, {}, "zero_stage"),
    "fp32_allreduce": (False, {"precision": "bfloat16"}, "communication_data_type"),
    "lr_decay_fraction": (0.5, {}, "lr_decay_iters"),
    "min_lr_ratio": (0.5, {}, "min_lr"),
    "train_tokens": (1e5, {"train_iters": None}, "train_iters"),
    "sample_input_file": ("x", {}, "text_gen_type"),
    "mixture": ({"sources": {"a": "x"}}, {}, "train_data_paths"),
    "eval_iters": (0, {"data_path": "x"}, "do_valid"),
    "num_gpus": (2, {}, "data_parallel_size"),
    "global_num_gpus": (2, {}, "data_parallel_size"),
    "num_nodes": (2, {"num_gpus": 2}, "data_parallel_size"),
}

# One value is possible, so there is nothing to read.
FIXED = {"deepspeed", "output_layer_parallelism", "data_impl", "ga_dataset_impl", "gd_retain_dataset_impl"} | {
    "dpo_fp32",
    "kto_fp32",
    "fp32_reinforce",
}

# Keys about pairs, of which tests/neox_args/test_pairs.py holds what they change.
PAIRS = {"dataset_impl", *(f"pos_{name}" for name in rules_pairs.FILLED)}

# Functions of the configuration that are called while a run goes on.
CALLED_FROM_ABOVE = {"batch_plan.py", "forget_steps.py", "rules_reference.py"}


@pytest.mark.parametrize("name", RULED)
def test_ruled_keys_change_what_they_rule(name: str, tmp_path: Path) -> None:
    value, others, ruled = RULED[name]
    before = derived(tmp_path, **({"use_mup": True, "mup_base_hidden_size": 32} if "use_mup" in others else others))
    assert derived(tmp_path, **others, **{name: value}).get(ruled) != before.get(ruled)


def test_every_live_key_is_read() -> None:
    files = [*ROOT.glob("*.py"), *(ROOT / "megatron").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    above = [path for path in files if "neox_arguments" not in path.parts or path.name in CALLED_FROM_ABOVE]
    code = "\n".join(path.read_text(encoding="utf-8") for path in above)
    live = {name for name, info in all_keys().items() if info.available and info.derived is None}
    read = {name for name in live if re.search(rf"[.\"']{name}\b", code)}
    for name in live - read:  # read for each role, as f"{name}_data_paths"
        role, _, rest = name.partition("_")
        if role in ("train", "valid", "test") and f"}}_{rest}" in code:
            read.add(name)
    read |= {key.format(role) for key in COMPANIONS.values() for role in ("train", "valid", "test")}
    assert live - read - set(RULED) - FIXED - PAIRS == set()
