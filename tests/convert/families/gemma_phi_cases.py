"""Gemma 1 to 3 and Phi-1 to 2: flat keys of small models with every option that each of them expresses."""

from __future__ import annotations

from typing import Any

from tests.convert.helpers import BASE, LLAMA

GEMMA: dict[str, Any] = {
    **LLAMA,
    "num_kv_heads": 2,
    "head_dim": 16,
    "norm": "rmsnorm_unit_offset",
    "activation": "geglu_tanh",
    "scale_embedding": True,
}
# A scale that is not the head's, and caps of the size of what they cap.
_SANDWICH = {"norm_placement": "sandwich", "query_pre_attn_scalar": 24}
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}
GEMMA2 = {**GEMMA, **_SANDWICH, **CAPS}
GEMMA3 = {**GEMMA, **_SANDWICH, "use_separate_qk_norms": True, "qk_norm_per_head": True}
PHI = {
    **BASE,
    "norm": "layernorm",
    "bias_gelu_fusion": True,
    "gpt_j_residual": True,
    "gpt_j_tied": True,
    "rotary_pct": 0.5,
    "use_bias_in_head": True,
}
_ALL, _ONE, _TIED = {"num_kv_heads": 4}, {"num_kv_heads": 1}, {"no_weight_tying": False}
_BIASES = {"use_bias_in_attn_linear": True}
_WINDOW = {"sliding_window_width": 5}
_LAYERED = {**_WINDOW, "attention_config": ["local", "global"]}
LOCAL = {**_LAYERED, "rotary_emb_base_local": 70.0}
_OLMO = {"norm_placement": "olmo3", "use_qk_layernorm": True, "use_separate_qk_norms": True}
_LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
_NO_CAPS = dict.fromkeys(CAPS)

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("gemma", "grouped, tied", {**GEMMA, **_TIED}),
    ("gemma", "all heads, biases, silu", {**GEMMA, **_ALL, **_BIASES, "activation": "swiglu"}),
    ("gemma", "one key head, tied, scaled positions", {**GEMMA, **_ONE, **_TIED, **_LINEAR}),
    ("gemma2", "grouped, tied, windows in some layers", {**GEMMA2, **_TIED, **_LAYERED}),
    ("gemma2", "all heads, a window everywhere, biases", {**GEMMA2, **_ALL, **_WINDOW, **_BIASES}),
    ("gemma2", "one key head, no caps, scaled positions", {**GEMMA2, **_ONE, **_NO_CAPS, **_LINEAR}),
    ("gemma3", "grouped, tied, windows with positions of their own", {**GEMMA3, **_TIED, **LOCAL}),
    (
        "gemma3",
        "all heads, biases, a cap, positions scaled in some layers",
        {**GEMMA3, **_ALL, **LOCAL, **_LINEAR, **_BIASES, "final_logit_softcapping": 2.5},
    ),
    ("gemma3", "one key head, scaled positions, no window", {**GEMMA3, **_ONE, **_LINEAR}),
    ("gemma3", "a window everywhere, positions scaled there too", {**GEMMA3, **_WINDOW, **_LINEAR}),
    ("phi", "all heads", PHI),
    ("phi", "grouped, scaled positions", {**PHI, "num_kv_heads": 2, **_LINEAR}),
    ("phi", "one key head, relu", {**PHI, **_ONE, "activation": "relu", "bias_gelu_fusion": False}),
]

REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {**GEMMA, "norm": "rmsnorm"}, "scale_embedding: True"),
    ("llama", {**LLAMA, "attn_logit_softcapping": 30.0}, "attn_logit_softcapping: 30.0"),
    ("llama", {**LLAMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0"),
    ("llama", {**LLAMA, "query_pre_attn_scalar": 9}, "query_pre_attn_scalar: 9"),
    ("llama", {**LLAMA, "use_bias_in_head": True}, "use_bias_in_head: True"),
    ("llama", {**LLAMA, "value_embedding_interval": 1}, "value_embedding_interval: 1"),
    ("olmo2", {**LLAMA, **LOCAL, **_OLMO}, "rotary_emb_base_local"),
    ("gpt2", {**BASE, "embedding_dropout": 0.25, "pos_emb": "learned"}, "embedding_dropout: 0.25"),
    ("gemma", {**GEMMA, "norm": "rmsnorm"}, "norm: rmsnorm"),
    ("gemma", {**GEMMA, "scale_embedding": False}, "scale_embedding: false"),
    ("gemma", {**GEMMA, "activation": "geglu"}, "its config's gelu means the tanh approximation"),
    ("gemma", {**GEMMA, **_WINDOW}, "full attention only"),
    ("gemma", GEMMA2, "norm_placement: sandwich"),
    ("gemma2", GEMMA, "before and behind"),
    ("gemma2", {**GEMMA2, "query_pre_attn_scalar": 24.5}, "24.5"),
    ("gemma2", GEMMA3, "no norms on queries and keys"),
    ("gemma2", {**GEMMA2, **LOCAL}, "rotary_emb_base_local: 70.0"),
    ("gemma2", {**GEMMA2, "num_attention_heads": 6}, "its heads must divide it"),
    ("gemma3", GEMMA2, "attn_logit_softcapping: 1.5"),
    ("gemma3", {**GEMMA3, "use_bias_in_mlp": True}, "no biases there"),
    ("phi", {**PHI, "gpt_j_tied": False}, "parallel, with one norm"),
    ("phi", {**PHI, "use_bias_in_head": False}, "use_bias_in_head: false"),
    ("phi", {**PHI, "use_bias_in_mlp": False}, "use_bias_in_mlp: false"),
    ("phi", {**PHI, **_WINDOW}, "full attention only"),
]
FOUND: list[tuple[str, dict[str, Any]]] = [("gemma", GEMMA), ("gemma2", GEMMA2), ("gemma3", GEMMA3), ("phi", PHI)]
