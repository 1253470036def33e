"""Overrides that make any config a model of a few thousand parameters for one CPU, with the same kinds of layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron.neox_arguments import NeoXArgs

HIDDEN, HEADS, SEQ = 64, 4, 32

# What a try on a CPU leaves out: other machines, services, and files that belong to the config's own run.
_ONE_RANK: dict[str, Any] = {
    "model_parallel_size": 1,
    "pipe_parallel_size": 0,
    "expert_parallel_size": 1,
    "sequence_parallel": False,
    "global_num_gpus": None,
    "num_gpus": None,
    "hostfile": None,
    "include": None,
    "exclude": None,
    "num_nodes": -1,
    "num_workers": 0,
    "attention_backend": "auto",
    "torch_compile": False,
}
_NO_SERVICES: dict[str, Any] = {
    "use_wandb": False,
    "use_comet": False,
    "use_trackio": False,
    "prometheus_file": None,
    "s3_path": None,
    "hf_save_interval": 0,
    "hf_upload_repo": None,
    "eval_tasks": None,
    "eval_suite": None,
    "log_dir": None,
    "tensorboard_dir": None,
}
_TWO_STEPS: dict[str, Any] = {
    "train_iters": 2,
    "lr_decay_iters": 2,
    "eval_iters": 1,
    "eval_interval": 2,
    "log_interval": 1,
    "extra_save_iters": None,
    "iteration": None,
    "load": None,
    "s3_load": None,
    "finetune": False,
}


# The third of them forgets.
_THREE_STEPS: dict[str, Any] = {
    "train_iters": 3,
    "lr_decay_iters": 3,
    "ga_mode": "interleaved",
    "ga_interleave_ratio": 1,
}


def synthetic_overrides(args: NeoXArgs, data: str, save: str | None) -> dict[str, Any]:
    """Two steps on the data set `data` (a prefix) of characters, into the folder `save`, whatever `args` reads."""
    paths: dict[str, Any] = {"data_path": data, "split": "80,10,10", "data_impl": "mmap", "save": save}
    for name in ("ga_dataset", "gd_retain_dataset"):
        if args.get(name) is not None:
            paths |= {name: data, name.replace("_dataset", "_label_dataset"): None}
    return {**paths, "tokenizer_type": "CharLevelTokenizer", "vocab_file": None, "merge_file": None, **_TWO_STEPS}


def shrink_overrides(args: NeoXArgs) -> dict[str, Any]:
    """What makes a derived config small: widths in proportion, each kind of layer once, one sample per step."""
    model = args.model
    kinds = list(dict.fromkeys(model.attention_config))
    layers = max(2, len(kinds))
    windows = model.sliding_window_width
    small: dict[str, Any] = {
        **_ONE_RANK,
        **_NO_SERVICES,
        "num_layers": layers,
        "attention_config": (kinds * layers)[:layers],
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_kv_heads": max(1, HEADS * model.num_kv_heads // model.num_attention_heads),
        "seq_length": SEQ,
        "max_position_embeddings": SEQ,
        "sliding_window_width": min(windows, SEQ // 4) if windows else windows,
        "train_batch_size": 1,
        **dict.fromkeys(("batch_size_schedule", "rampup_batch_size", "seq_length_ramp")),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
    }
    if args.optimizer.precision == "fp16":  # a CPU has no loss scaling
        small["precision"] = "bfloat16"
    proportional = {"intermediate_size": 8, "dim_att": 32, "ffn_dim": 32, "moe_intermediate_size": 8}
    for name, unit in proportional.items():
        if args.is_set(name):
            small[name] = max(unit, round(args.get(name) * HIDDEN / model.hidden_size / unit) * unit)
    smaller = {"head_dim": HIDDEN // HEADS, "head_size": 32, "mamba_head_dim": 16, "moe_num_experts": 4}
    smaller |= {"mamba_d_state": 16, "moe_top_k": 2, "moe_shared_expert_size": HIDDEN, "mup_base_hidden_size": HIDDEN}
    small |= {name: min(args.get(name), most) for name, most in smaller.items() if args.is_set(name)}
    if args.get("ga_dataset") is not None:
        small |= _THREE_STEPS
    if model.mlp_config is not None:
        small["mlp_config"] = list(model.mlp_config[:layers])
    return small


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Values as `key=value` texts of a command line."""
    return [f"{name}={json.dumps(value)}" for name, value in values.items()]
