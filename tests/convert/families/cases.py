"""The families: flat keys of small models with every option that each of them expresses.

Every family has a case with as many key/value heads as query heads, with fewer, and with one; with a tied and an untied
head; with and without biases and windows: where it expresses that (test_families.py checks it).
"""

from __future__ import annotations

from typing import Any

from tests.convert.families import gemma_phi_cases as gemma_phi
from tests.convert.families import mamba_cases as mamba
from tests.convert.families import moe_cases as moe
from tests.convert.families import rwkv_cases as rwkv
from tests.convert.helpers import BASE, LLAMA, NEOX

NO_ATTENTION_BIAS = {"use_bias_in_attn_linear": False, "activation": "relu"}
GROUPED: dict[str, Any] = {**LLAMA, "num_kv_heads": 2}
QWEN2 = {**GROUPED, "use_bias_in_attn_linear": True, "use_bias_in_attn_output": False}
QWEN3 = {**GROUPED, "head_dim": 16, "use_separate_qk_norms": True, "qk_norm_per_head": True}
OLMO = {**GROUPED, "norm_placement": "olmo3", "use_qk_layernorm": True, "use_separate_qk_norms": True}
GPT2 = {**BASE, "pos_emb": "learned", "norm": "layernorm", "bias_gelu_fusion": True, "no_weight_tying": False}
FALCON = {**BASE, "norm": "layernorm", "gpt_j_residual": True, "no_weight_tying": False}
PHI3 = {**GROUPED, "rotary_pct": 0.5}
NO_BIAS = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
TIED, UNTIED = {"no_weight_tying": False}, {"no_weight_tying": True}
ALL, ONE = {"num_kv_heads": 4}, {"num_kv_heads": 1}
WINDOW = {"sliding_window_width": 5}
ABOVE = {**WINDOW, "attention_config": ["flash", "local"]}
LAYERED = {**WINDOW, "attention_config": ["local", "global"]}
# The kinds of frequencies that Llama 3.1 tells apart are all there at head size 8, base 500.
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
LOCAL = {"rotary_emb_base_local": LLAMA["rotary_emb_base"]}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.1, 2.5],
    "long_factor": [1.5, 4.0],
    "original_max_position_embeddings": 10,  # of the 12 tokens compared, and crossed while writing
}
SCALED = {"rope_scaling": YARN}

FAMILY_CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("neox", "parallel", {**NEOX, "gpt_j_residual": True}),
    ("neox", "sequential, tied, full rotary, tanh gelu", {**NEOX, **TIED, "rotary_pct": 1.0, "bias_gelu_fusion": True}),
    ("neox", "no attention bias, half rotary, scaled", {**NEOX, **NO_ATTENTION_BIAS, "rotary_pct": 0.5, **SCALED}),
    ("llama", "all heads, biases", {**LLAMA, "use_bias_in_attn_linear": True, "use_bias_in_mlp": True}),
    ("llama", "grouped, tied, scaled positions", {**GROUPED, **TIED, "rope_scaling": LLAMA_3_1}),
    ("llama", "one key head, geglu", {**LLAMA, **ONE, "activation": "geglu"}),
    ("mistral", "grouped, a window", {**GROUPED, **WINDOW}),
    ("mistral", "all heads, a window, tied", {**LLAMA, **TIED, **WINDOW}),
    ("mistral", "one key head, a base not whole", {**LLAMA, **ONE, "rotary_emb_base": 500.5}),
    ("qwen2", "grouped, tied", {**QWEN2, **TIED}),
    ("qwen2", "all heads, a window above", {**QWEN2, **ABOVE, **ALL}),
    ("qwen2", "one key head, scaled positions", {**QWEN2, **ONE, **SCALED}),
    ("qwen3", "wide heads, scaled positions", {**QWEN3, **SCALED}),
    ("qwen3", "all heads, a window above", {**QWEN3, **ABOVE, **ALL}),
    ("qwen3", "biases, one key head, tied", {**QWEN3, **TIED, **ONE, "use_bias_in_attn_linear": True}),
    ("olmo2", "grouped", OLMO),
    ("olmo2", "all heads, biases", {**OLMO, **ALL, "use_bias_in_attn_linear": True}),
    ("olmo2", "one key head, tied, scaled", {**OLMO, **ONE, **TIED, "rope_scaling": LLAMA_3_1}),
    ("olmo3", "windows in some layers", {**OLMO, **LAYERED}),
    ("olmo3", "all heads, windows in some layers, biases", {**OLMO, **LAYERED, **ALL, "use_bias_in_attn_linear": True}),
    ("olmo3", "one key head, a window everywhere, tied", {**OLMO, **ONE, **WINDOW, **TIED}),
    ("olmo3", "no window, scaled positions", {**OLMO, **SCALED}),
    ("olmo3", "as published: scaled positions where there is no window", {**OLMO, **LAYERED, **SCALED, **LOCAL}),
    ("olmo3", "other positions in windows", {**OLMO, **LAYERED, "rotary_emb_base_local": 300.5}),
    ("gpt2", "tied, tanh gelu", GPT2),
    ("gpt2", "untied, gelu, narrow", {**GPT2, "bias_gelu_fusion": False, **UNTIED, "intermediate_size": 80}),
    ("falcon", "7B: one norm, one key head", {**FALCON, **NO_BIAS, **ONE, "gpt_j_tied": True}),
    ("falcon", "40B: two norms, grouped", {**FALCON, "num_kv_heads": 2}),
    ("falcon", "11B: one norm, grouped", {**FALCON, "num_kv_heads": 2, "gpt_j_tied": True}),
    ("falcon", "all heads, one norm, scaled positions", {**FALCON, "gpt_j_tied": True, **SCALED}),
    ("falcon", "sequential, untied", {**FALCON, "gpt_j_residual": False, **UNTIED}),
    ("phi3", "grouped, half rotary", PHI3),
    ("phi3", "all heads, a window, tied", {**PHI3, **ALL, **WINDOW, **TIED}),
    ("phi3", "one key head, for long texts", {**PHI3, **ONE, "rope_scaling": LONGROPE}),
    *gemma_phi.CASES,
    *mamba.CASES,
    *rwkv.CASES,
    *moe.CASES,
]  # fmt: skip
