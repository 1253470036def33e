"""Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE: flat keys of small models with every option that each of them expresses."""

from __future__ import annotations

from typing import Any

from tests.convert.helpers import LLAMA

EXPERTS: dict[str, Any] = {
    **LLAMA,
    "num_kv_heads": 2,
    "intermediate_size": 24,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_router_type": "topk",
}
NORMALISED = {"moe_normalize_topk": True}
MIXTRAL = {**EXPERTS, **NORMALISED}
OLMOE = {**EXPERTS, "use_qk_layernorm": True, "use_separate_qk_norms": True}
QWEN2_MOE = {
    **EXPERTS,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "moe_shared_expert_size": 40,
    "moe_shared_expert_gate": True,
    "use_bias_in_attn_linear": True,
    "use_bias_in_attn_output": False,
}
QWEN3_MOE = {
    **EXPERTS,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "use_separate_qk_norms": True,
    "qk_norm_per_head": True,
}
_TIED, _ALL, _ONE = {"no_weight_tying": False}, {"num_kv_heads": 4}, {"num_kv_heads": 1}
_WINDOW, _BIASES = {"sliding_window_width": 5}, {"use_bias_in_attn_linear": True}
_SOME_WINDOWS = {**_WINDOW, "attention_config": ["local", "global"]}
_NO_QKV_BIAS = {"use_bias_in_attn_linear": False, "use_bias_in_attn_output": True}
_FIRST = {"moe_layers": [0]}
_SCALED = {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("mixtral", "grouped", MIXTRAL),
    ("mixtral", "all heads, a window, wide heads, tied", {**MIXTRAL, **_ALL, **_WINDOW, **_TIED, "head_dim": 16}),
    ("mixtral", "one key head, three of eight experts", {**MIXTRAL, **_ONE, "moe_num_experts": 8, "moe_top_k": 3}),
    ("olmoe", "as published: all heads", {**OLMOE, **_ALL}),
    ("olmoe", "grouped, biases, normalised, scaled", {**OLMOE, **_BIASES, **NORMALISED, **_SCALED}),
    ("olmoe", "one key head, tied, one expert of four", {**OLMOE, **_ONE, **_TIED, "moe_top_k": 1}),
    ("qwen2_moe", "grouped", QWEN2_MOE),
    ("qwen2_moe", "all heads, first layer dense, tied", {**QWEN2_MOE, **_ALL, **_TIED, "moe_layers": [1]}),
    ("qwen2_moe", "one key head, normalised, some windows", {**QWEN2_MOE, **_ONE, **NORMALISED, **_SOME_WINDOWS}),
    ("qwen2_moe", "no biases, a window everywhere", {**QWEN2_MOE, **_NO_QKV_BIAS, **_WINDOW}),
    ("qwen3_moe", "as published: grouped, normalised", {**QWEN3_MOE, **NORMALISED}),
    ("qwen3_moe", "all heads, biases, last layer dense, tied", {**QWEN3_MOE, **_ALL, **_BIASES, **_TIED, **_FIRST}),
    ("qwen3_moe", "one key head, a window", {**QWEN3_MOE, **_ONE, **_WINDOW}),
]  # fmt: skip

_BALANCED = {"moe_bias_balancing_rate": 0.001}
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", EXPERTS, "moe_normalize_topk: false"),
    ("mixtral", LLAMA, "no layer that is a mixture of experts"),
    ("mixtral", {**MIXTRAL, "moe_expert_interval": 2}, "layers that are no mixture of experts"),
    ("mixtral", {**MIXTRAL, "moe_router_score": "sigmoid"}, "moe_router_score: sigmoid"),
    ("mixtral", {**MIXTRAL, "moe_router_type": "sinkhorn", "moe_normalize_topk": False}, "moe_router_type: sinkhorn"),
    ("mixtral", {**MIXTRAL, "moe_expert_bias": True}, "moe_expert_bias"),
    ("mixtral", {**MIXTRAL, "moe_shared_expert_size": 40}, "it has no shared expert"),
    ("mixtral", {**MIXTRAL, **_BIASES}, "it has no biases"),
    ("olmoe", EXPERTS, "no use_separate_qk_norms over all heads"),
    ("olmoe", {**OLMOE, **_BALANCED}, "moe_bias_balancing_rate"),
    ("olmoe", {**OLMOE, "moe_routed_scaling": 2.5}, "moe_routed_scaling: 2.5"),
    ("olmoe", {**OLMOE, **_WINDOW}, "full attention only"),
    ("qwen2_moe", {**QWEN2_MOE, "moe_shared_expert_gate": False}, "with moe_shared_expert_gate"),
    ("qwen2_moe", {**QWEN2_MOE, "use_bias_in_attn_output": True}, "not on the output"),
    ("qwen3_moe", EXPERTS, "normalises each head"),
    ("qwen3_moe", {**QWEN3_MOE, **_SOME_WINDOWS}, "a window in some layers only"),
    ("llama", EXPERTS, "feed-forwards of kind moe"),
]

FOUND = [("mixtral", MIXTRAL), ("olmoe", OLMOE), ("qwen2_moe", QWEN2_MOE), ("qwen3_moe", QWEN3_MOE)]

# Written from the public hyper-parameters, with the fields that files of that time have.
# fmt: off
_COMMON: dict[str, Any] = {
    "use_cache": True, "initializer_range": 0.02, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "attention_dropout": 0.0, "tie_word_embeddings": False, "output_router_logits": False,
}
_MIXTRAL: dict[str, Any] = {
    **_COMMON, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "transformers_version": "4.36.0.dev0", "vocab_size": 32000,
}
_QWEN: dict[str, Any] = {
    **_COMMON, "bos_token_id": 151643, "eos_token_id": 151643, "decoder_sparse_step": 1, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "use_sliding_window": False, "vocab_size": 151936,
}
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
    "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 32768,
    "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rope_scaling": None, "sliding_window": None, "transformers_version": "4.51.0",
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral/8x7B": _MIXTRAL,
    "mixtral/8x22B": {
        **_MIXTRAL, "hidden_size": 6144, "intermediate_size": 16384, "max_position_embeddings": 65536,
        "num_attention_heads": 48, "num_hidden_layers": 56, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
    },
    "qwen3-moe/30B-A3B": _QWEN3_MOE,
    "qwen3-moe/235B-A22B": {
        **_QWEN3_MOE, "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "max_window_layers": 94, "moe_intermediate_size": 1536, "num_attention_heads": 64, "num_hidden_layers": 94,
    },
    "qwen2-moe/A2.7B": {
        **_QWEN, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 2048,
        "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21, "norm_topk_prob": False,
        "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768, "transformers_version": "4.39.0.dev0",
    },
    "qwen2-moe/57B-A14B": {
        **_QWEN, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 3584,
        "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28, "mlp_only_layers": [],
        "norm_topk_prob": False, "moe_intermediate_size": 2560, "num_attention_heads": 28, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "shared_expert_intermediate_size": 20480, "sliding_window": 65536, "transformers_version": "4.40.1",
    },
    "olmoe/1B-7B": {
        **_COMMON, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": False,
        "clip_qkv": None, "eos_token_id": 50279, "hidden_size": 2048, "intermediate_size": 1024,
        "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "pad_token_id": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
        "transformers_version": "4.43.0.dev0", "vocab_size": 50304,
    },
}
# fmt: on
