"""Mamba-1 and Mamba-2: flat keys of small models with every option that each of them expresses."""

from __future__ import annotations

from typing import Any

from tests.convert.helpers import BASE, LLAMA

_STATES: dict[str, Any] = {
    **{key: value for key, value in BASE.items() if key != "num_attention_heads"},
    "pos_emb": "none",
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-5,
    "mamba_d_state": 8,
    "mamba_use_bias_in_x_proj": False,
}
MAMBA = {**_STATES, "attention_config": [[["mamba"], "all"]]}
MAMBA2 = {**_STATES, "attention_config": [[["mamba2"], "all"]], "mamba_head_dim": 16}
_TIED, _BIASES = {"no_weight_tying": False}, {"mamba_use_bias_in_linears": True}
_NO_CONV_BIAS = {"mamba_use_bias_in_conv": False}

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("mamba", "as published: tied", {**MAMBA, **_TIED}),
    ("mamba", "biases, other widths", {**MAMBA, **_BIASES, "mamba_dt_rank": 5, "mamba_expand": 3, "mamba_d_conv": 3}),
    ("mamba", "no bias in the convolution", {**MAMBA, **_NO_CONV_BIAS}),
    ("mamba2", "as published: one group, tied", {**MAMBA2, **_TIED}),
    ("mamba2", "two groups, biases, other widths", {**MAMBA2, **_BIASES, "mamba_n_groups": 2, "mamba_d_conv": 3}),
    (
        "mamba2",
        "four groups, narrow heads, no bias in the convolution, short chunks",
        {**MAMBA2, **_NO_CONV_BIAS, "mamba_n_groups": 4, "mamba_head_dim": 8, "mamba_chunk_size": 5},
    ),
]

REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {**MAMBA, **_BIASES, "mamba_use_bias_in_x_proj": True}, "mamba_use_bias_in_x_proj"),
    ("mamba", MAMBA2, "other kinds than mamba"),
    ("mamba", {**MAMBA, "pos_emb": "learned"}, "pos_emb: learned"),
    ("mamba2", {**MAMBA2, "norm": "layernorm"}, "norm: layernorm"),
    ("mamba2", {**LLAMA, "attention_config": ["mamba2", "global"]}, "other kinds than mamba2"),
    ("llama", {**LLAMA, "attention_config": ["mamba", "global"]}, "other kinds than attention"),
]

FOUND = [("mamba", MAMBA), ("mamba2", MAMBA2)]

# Written from the public hyper-parameters, with the fields that files of that time have.
_COMMON = {
    "hidden_act": "silu", "initializer_range": 0.1, "layer_norm_epsilon": 1e-05, "rescale_prenorm_residual": False,
    "residual_in_fp32": True, "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001, "conv_kernel": 4,
    "torch_dtype": "float32", "transformers_version": "4.39.0", "use_bias": False, "use_cache": True, "expand": 2,
    "use_conv_bias": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "rms_norm": True,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "mamba/mamba-130M": {
        **_COMMON, "model_type": "mamba", "architectures": ["MambaForCausalLM"], "d_model": 768, "n_layer": 24,
        "hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 24, "state_size": 16, "ssm_cfg": {},
        "fused_add_norm": True, "time_step_rank": 48, "time_step_scale": 1.0, "time_step_init_scheme": "random",
        "vocab_size": 50280,
    },
    "mamba/mamba-2.8B": {
        **_COMMON, "model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 2560, "d_inner": 5120,
        "intermediate_size": 5120, "num_hidden_layers": 64, "state_size": 16, "time_step_rank": 160,
        "time_step_scale": 1.0, "time_step_init_scheme": "random", "vocab_size": 50280,
    },
    "mamba2/130M": {
        **_COMMON, "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "hidden_size": 768, "head_dim": 64,
        "num_heads": 24, "n_groups": 1, "state_size": 128, "num_hidden_layers": 24, "chunk_size": 256,
        "time_step_limit": [0.0, float("inf")], "time_step_rank": 48, "norm_before_gate": False,
        "tie_word_embeddings": True, "vocab_size": 50288,
    },
    "mamba2/2.7B": {
        **_COMMON, "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "hidden_size": 2560, "head_dim": 64,
        "num_heads": 80, "n_groups": 1, "state_size": 128, "num_hidden_layers": 64, "chunk_size": 256,
        "time_step_limit": [0.0, float("inf")], "time_step_rank": 160, "norm_before_gate": False,
        "tie_word_embeddings": True, "vocab_size": 50288,
    },
}  # fmt: skip

CONFIG_REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("mamba/mamba-130M", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    ("mamba/mamba-130M", {"intermediate_size": 1600}, "intermediate_size: 1600"),
    ("mamba2/130M", {"time_step_limit": [0.0, 0.5]}, "time_step_limit"),
    ("mamba2/130M", {"num_heads": 20}, "num_heads: 20"),
    ("mamba2/130M", {"norm_before_gate": True}, "gated norm"),
]
