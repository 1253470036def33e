"""The dense families: flat keys of small models with every option that each of them expresses."""

from __future__ import annotations

from typing import Any

from tests.convert.helpers import BASE, LLAMA

GROUPED: dict[str, Any] = {**LLAMA, "num_kv_heads": 2}
QWEN2 = {**GROUPED, "use_bias_in_attn_linear": True, "use_bias_in_attn_output": False}
QWEN3 = {**GROUPED, "head_dim": 16, "use_separate_qk_norms": True, "qk_norm_per_head": True}
OLMO = {**GROUPED, "norm_placement": "olmo3", "use_separate_qk_norms": True}
GPT2 = {**BASE, "pos_emb": "learned", "norm": "layernorm", "bias_gelu_fusion": True, "no_weight_tying": False}
FALCON = {**BASE, "norm": "layernorm", "gpt_j_residual": True, "no_weight_tying": False}
PHI3 = {**GROUPED, "rotary_pct": 0.5}
NO_BIAS = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
TIED, UNTIED = {"no_weight_tying": False}, {"no_weight_tying": True}
ABOVE = {"sliding_window_width": 5, "attention_config": ["flash", "local"]}
LAYERED = {"sliding_window_width": 5, "attention_config": ["local", "global"]}

FAMILY_CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2", "grouped, tied", {**QWEN2, "no_weight_tying": False}),
    ("qwen2", "all heads, a window above", {**QWEN2, **ABOVE, "num_kv_heads": 4}),
    ("qwen3", "wide heads", QWEN3),
    ("qwen3", "biases, one key head, tied", {**QWEN3, **TIED, "num_kv_heads": 1, "use_bias_in_attn_linear": True}),
    ("olmo2", "grouped", OLMO),
    ("olmo2", "all heads, biases", {**OLMO, "num_kv_heads": 4, "use_bias_in_attn_linear": True}),
    ("olmo3", "windows in some layers", {**OLMO, **LAYERED}),
    ("olmo3", "a window everywhere, tied", {**OLMO, "sliding_window_width": 5, "no_weight_tying": False}),
    ("gpt2", "tied, tanh gelu", GPT2),
    ("gpt2", "untied, gelu, narrow", {**GPT2, "bias_gelu_fusion": False, **UNTIED, "intermediate_size": 80}),
    ("falcon", "7B: one norm, one key head", {**FALCON, **NO_BIAS, "gpt_j_tied": True, "num_kv_heads": 1}),
    ("falcon", "40B: two norms, grouped", {**FALCON, "num_kv_heads": 2}),
    ("falcon", "11B: one norm, grouped", {**FALCON, "num_kv_heads": 2, "gpt_j_tied": True}),
    ("falcon", "all heads, one norm", {**FALCON, "gpt_j_tied": True}),
    ("falcon", "sequential, untied", {**FALCON, "gpt_j_residual": False, "no_weight_tying": True}),
    ("phi3", "grouped, half rotary", PHI3),
    ("phi3", "window, tied", {**PHI3, "sliding_window_width": 5, "no_weight_tying": False}),
]  # fmt: skip
