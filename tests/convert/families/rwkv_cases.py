"""RWKV-4: flat keys of small models with every option that transformers' class expresses."""

from __future__ import annotations

from typing import Any

from tests.convert.helpers import BASE, LLAMA

RWKV4: dict[str, Any] = {
    **{key: value for key, value in BASE.items() if key != "num_attention_heads"},
    "pos_emb": "none",
    "norm": "layernorm",
    "attention_config": [[["rwkv4"], "all"]],
}

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("rwkv4", "as published", RWKV4),
    ("rwkv4", "tied, a narrow channel mixing", {**RWKV4, "no_weight_tying": False, "ffn_dim": 72}),
]

REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("rwkv4", {**RWKV4, "norm": "rmsnorm"}, "norm: rmsnorm"),
    ("rwkv4", {**RWKV4, "layernorm_epsilon": 1e-6}, "layernorm_epsilon: 1e-06 .its last norm has 1e-05"),
    ("rwkv4", {**RWKV4, "dim_att": 48}, "dim_att: 48"),
    ("rwkv4", {**RWKV4, "pos_emb": "learned"}, "pos_emb: learned"),
    ("rwkv4", {**LLAMA, "attention_config": ["rwkv4", "global"]}, "other kinds than rwkv4"),
    ("llama", {**LLAMA, "attention_config": ["rwkv4", "global"]}, "other kinds than attention"),
]

FOUND = [("rwkv4", RWKV4)]

# Written from the public hyper-parameters, with the fields that files of that time have.
_COMMON = {
    "model_type": "rwkv", "architectures": ["RwkvForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
    "context_length": 1024, "layer_norm_epsilon": 1e-05, "rescale_every": 6, "tie_word_embeddings": False,
    "torch_dtype": "float32", "transformers_version": "4.29.0.dev0", "use_cache": True, "vocab_size": 50277,
}  # fmt: skip


def _published(layers: int, hidden: int) -> dict[str, Any]:
    widths = {"hidden_size": hidden, "attention_hidden_size": hidden, "intermediate_size": 4 * hidden}
    return {**_COMMON, **widths, "num_hidden_layers": layers}


PUBLISHED: dict[str, dict[str, Any]] = {
    "rwkv/169M": _published(12, 768),
    "rwkv/430M": _published(24, 1024),
    "rwkv/1.5B": _published(24, 2048),
    "rwkv/3B": _published(32, 2560),
    "rwkv/7B": _published(32, 4096),
    "rwkv/14B": _published(40, 5120),
}

CONFIG_REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("rwkv/169M", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon: 1e-06"),
    ("rwkv/169M", {"attention_hidden_size": 1024}, "attention_hidden_size: 1024"),
]
