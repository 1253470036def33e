"""Tiny models of every kind, none of them blind by symmetry (tiny.py)."""

from __future__ import annotations

from typing import Any

from tests.training import tiny

# Weights so large that tokens differ behind the random biases. With the usual 0.02 attention is almost a mean, and all
# tokens choose the same experts: a mistake there hardly moves a loss.
NEOX, LLAMA, GEMMA3, CAPPED = (
    {**keys, "init_method_std": 0.2} for keys in (tiny.NEOX, tiny.LLAMA, tiny.GEMMA3, tiny.CAPPED)
)
ROUTED = {"moe_num_experts": 8, "moe_router_type": "topk", "moe_top_k": 2, "moe_intermediate_size": 24}
EXPERTS = {**ROUTED, "moe_expert_bias": True}
BALANCED = {**ROUTED, "moe_aux_loss_coeff": 0.02}
# On top of a model of tiny.py or runs.py.
MAMBA_AND_ATTENTION = {
    "attention_config": [[["mamba2", "global"], "all"]],
    "mamba_d_state": 8,
    "mamba_head_dim": 8,
    "no_weight_tying": True,
}
STATES: dict[str, Any] = {
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-5,
    "no_weight_tying": True,
    "mamba_d_state": 8,
    "mamba_head_dim": 8,
    "mamba_use_bias_in_linears": True,
    "init_method_std": 0.1,
}
# A sum in another order moves an entry that is almost zero by much of itself: with this epsilon Adam does not turn that
# into a step of the full length.
ADAM: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-4}}}
RWKV: dict[str, Any] = {
    **NEOX,
    "attention_config": [[["rwkv4"], "all"]],
    "pos_emb": "none",
    "norm": "layernorm",
    "gpt_j_residual": False,
    "ffn_dim": 72,
    "init_method_std": 0.1,
}
MODELS: dict[str, dict[str, Any]] = {
    "neox": NEOX,
    "neox-tied": {**NEOX, "no_weight_tying": False, "gpt_j_residual": False},
    "llama": LLAMA,
    "llama-untied": {**LLAMA, "no_weight_tying": True},
    "mha": {**NEOX, "num_kv_heads": 4},
    "llama-bf16": {**LLAMA, "precision": "bfloat16"},
    "llama-fp16": {**LLAMA, "precision": "fp16", "fp16": {"initial_scale_power": 8}},
    "llama-8-heads": {**LLAMA, "num_attention_heads": 8, "num_kv_heads": 4},
    "gemma3": GEMMA3,
    "capped": CAPPED,
    # a dense layer beside one with experts, tied, with losses of balance
    "moe": {
        **LLAMA,
        **EXPERTS,
        "moe_layers": ["dense", "moe"],
        "moe_aux_loss_coeff": 0.02,
        "moe_z_loss_coeff": 0.01,
        "moe_shared_expert_size": 16,
        "moe_shared_expert_gate": True,
    },
    # experts in every layer, each layer with losses of balance, one expert per token: many get none
    "moe-all": {
        **NEOX,
        **EXPERTS,
        "moe_num_experts": 16,
        "moe_top_k": 1,
        "moe_aux_loss_coeff": 0.02,
        "moe_z_loss_coeff": 0.01,
    },
    # several layers with experts in a stage
    "moe-deep": {
        **NEOX,
        **EXPERTS,
        "num_layers": 4,
        "moe_layers": ["moe", "moe", "dense", "moe"],
        "moe_aux_loss_coeff": 0.02,
    },
    # dropping by document
    "moe-documents": {**LLAMA, **EXPERTS, "intra_document_masking": True, "moe_capacity_factor": 1.0},
    "documents": {**NEOX, "intra_document_masking": True},
    "learned": {**NEOX, "pos_emb": "learned", "gpt_j_residual": False},
    "alibi": {**NEOX, "pos_emb": "alibi"},
    # a table, and the tokens, that the embedding hands to all layers; one layer in two has vectors of its own for them
    "rpe": {**LLAMA, "pos_emb": "rpe", "value_embedding_interval": 2},
    "dora": {**LLAMA, "lora_r": 3, "lora_alpha": 6.0, "use_dora": True},
    "mup": {**LLAMA, "use_mup": True, "mup_base_hidden_size": 16, "mup_embedding_mult": 3.0},
    "olmo": {**LLAMA, "norm_placement": "olmo3", "use_qk_layernorm": True, "use_separate_qk_norms": True},
    "qk-norm": {**NEOX, "use_qk_layernorm": True, "norm": "layernorm"},
    "mamba": {**NEOX, **STATES, "attention_config": [[["mamba"], "all"]], "pos_emb": "none"},
    "mamba2": {**NEOX, **STATES, "attention_config": [[["mamba2"], "all"]], "pos_emb": "none"},
    "mamba-hybrid": {**LLAMA, **STATES, "attention_config": [[["mamba2", "global"], "all"]], "mamba_n_groups": 2},
    "rwkv4": RWKV,
    "rwkv4-hybrid": {
        **RWKV,
        "attention_config": [[["rwkv4", "global"], "all"]],
        "pos_emb": "rotary",
        "no_weight_tying": False,
    },
    "rwkv6": {**RWKV, "attention_config": [[["rwkv"], "all"]], "head_size": 8},
    "gmlp": {**NEOX, "attention_config": [[["gmlp"], "all"]], "gpt_j_residual": False, "pos_emb": "none"},
    "amlp": {**NEOX, "attention_config": [[["amlp"], "all"]], "gpt_j_residual": False, "pos_emb": "none"},
}
