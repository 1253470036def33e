"""Small models whose mixers keep a state (Mamba, Mamba-2, RWKV-4, RWKV-6), alone and beside attention; gMLP and aMLP;
relative positions."""

from __future__ import annotations

from typing import Any

STATES: dict[str, Any] = {
    "norm": "rmsnorm",
    "mamba_d_state": 8,
    "mamba_head_dim": 8,
    "mamba_use_bias_in_linears": True,
    "init_method_std": 0.2,
}
MAMBA = {**STATES, "attention_config": [[["mamba"], "all"]], "pos_emb": "none"}
MAMBA2 = {**STATES, "attention_config": [[["mamba2"], "all"]], "pos_emb": "none"}
MAMBA_HYBRID = {**STATES, "attention_config": ["mamba", "global", "mamba2", "local"], "sliding_window_width": 5}
MAMBA_HYBRID |= {"num_layers": 4, "mamba_n_groups": 2}

GMLP: dict[str, Any] = {"attention_config": [[["gmlp"], "all"]], "pos_emb": "none", "init_method_std": 0.2}
AMLP: dict[str, Any] = {**GMLP, "attention_config": [[["amlp", "gmlp"], "all"]], "gmlp_attn_dim": 6, "norm": "rmsnorm"}
AMLP_HYBRID = {**AMLP, "attention_config": ["amlp", "local"], "sliding_window_width": 5, "pos_emb": "alibi"}
RPE: dict[str, Any] = {"pos_emb": "rpe", "rpe_num_buckets": 6, "rpe_max_distance": 9, "init_method_std": 0.2}

RWKV: dict[str, Any] = {
    "attention_config": [[["rwkv4"], "all"]],
    "pos_emb": "none",
    "norm": "layernorm",
    "init_method_std": 0.2,
    "output_layer_init_method": "normal",
}
WIDTHS = {**RWKV, "dim_att": 48, "ffn_dim": 40}
RWKV_HYBRID = {**RWKV, "attention_config": ["rwkv4", "global", "rwkv4", "local"], "sliding_window_width": 5}
RWKV_HYBRID |= {"num_layers": 4, "pos_emb": "rotary"}
RWKV6 = {**RWKV, "attention_config": [[["rwkv"], "all"]], "dim_att": 48, "head_size": 8}
BOTH = {**RWKV_HYBRID, "attention_config": ["rwkv", "global", "rwkv4", "local"], "ffn_dim": 40, "head_size": 8}
