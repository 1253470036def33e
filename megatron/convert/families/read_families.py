"""Readers of config.json of the families whose tables are in qwen.py, olmo.py, gpt2.py, falcon.py and phi.py."""

from __future__ import annotations

from typing import Any

from megatron.convert.parts.activations import READ_PLAIN
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.read_config import READERS, Reader, decoder_keys
from megatron.convert.parts.read_positions import layered_positions
from megatron.convert.parts.windows import FULL, SLIDING
from megatron.errors import UserError


def qwen2_keys(fields: Fields) -> dict[str, Any]:
    """`Qwen2Config`."""
    fields.only("use_mrope", False)
    biases = {"use_bias_in_attn_linear": True, "use_bias_in_attn_output": False, "use_bias_in_mlp": False}
    return {**decoder_keys(fields), **biases, **_upper_windows(fields)}


def qwen3_keys(fields: Fields) -> dict[str, Any]:
    """`Qwen3Config`. Its heads are 128 wide unless it says otherwise."""
    return {
        **decoder_keys(fields),
        "head_dim": fields.take("head_dim", 128),
        "use_separate_qk_norms": True,
        "qk_norm_per_head": True,
        "use_bias_in_attn_linear": fields.take("attention_bias", False),
        "use_bias_in_mlp": False,
        **_upper_windows(fields),
    }


def _upper_windows(fields: Fields) -> dict[str, Any]:
    """Qwen's: a window in the layers above `max_window_layers`, if at all."""
    layers = fields.take("num_hidden_layers")
    window, first = fields.take("sliding_window", 4096), fields.take("max_window_layers", 28)
    if not fields.take("use_sliding_window", False):
        window = None
    types = [SLIDING if window is not None and i >= first else FULL for i in range(layers)]
    return windows(fields, window, fields.take("layer_types", types))


def windows(fields: Fields, window: int | None, types: list[str]) -> dict[str, Any]:
    """Our keys for a window in the layers of type sliding_attention. Theirs counts the query itself, ours does not."""
    layers = fields.take("num_hidden_layers")
    if len(types) != layers or set(types) - {SLIDING, FULL}:
        raise UserError(f"{fields.where}: layer_types: must be {layers} times {SLIDING} or {FULL}, is {types!r}")
    if SLIDING not in types:
        return {}
    if window is None or window < 2:
        raise UserError(f"{fields.where}: sliding_window: {window} cannot be expressed with layers of {SLIDING}")
    keys: dict[str, Any] = {"sliding_window_width": window - 1}
    if FULL in types:
        keys["attention_config"] = ["local" if kind == SLIDING else "global" for kind in types]
    return keys


def olmo2_keys(fields: Fields, rotary: dict[str, Any] | None = None) -> dict[str, Any]:
    """`Olmo2Config`."""
    return {
        **decoder_keys(fields, rotary),
        "norm_placement": "olmo3",
        "use_separate_qk_norms": True,
        "use_bias_in_attn_linear": fields.take("attention_bias", False),
        "use_bias_in_mlp": False,
    }


def olmo3_keys(fields: Fields) -> dict[str, Any]:
    """`Olmo3Config`."""
    layers, base = fields.take("num_hidden_layers"), fields.take("rope_theta", 500000.0)
    types = fields.take("layer_types", [FULL if (i + 1) % 4 == 0 else SLIDING for i in range(layers)])
    spans = windows(fields, fields.take("sliding_window", 4096), types)
    rotary, local = layered_positions(fields, base, base)
    return {**olmo2_keys(fields, rotary), **spans, **({"rotary_emb_base_local": local} if local and spans else {})}


def gpt2_keys(fields: Fields) -> dict[str, Any]:
    """`GPT2Config`."""
    for name in ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"):
        fields.take(name, None)  # of other heads than the language model's
    fields.take("summary_first_dropout", None)
    for name, value in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("reorder_and_upcast_attn", False),
    ):
        fields.only(name, value)
    hidden, length = fields.take("n_embd", 768), fields.take("n_positions", 1024)
    fields.only("n_ctx", length)
    dropout = fields.take("resid_pdrop", 0.1)
    fields.only("embd_pdrop", dropout)
    activation, tanh = fields.choose("activation_function", READ_PLAIN, "gelu_new")
    return {
        "num_layers": fields.take("n_layer", 12),
        "hidden_size": hidden,
        "num_attention_heads": fields.take("n_head", 12),
        "intermediate_size": fields.take("n_inner", 4 * hidden),
        "max_position_embeddings": length,
        "norm": "layernorm",
        "layernorm_epsilon": float(fields.take("layer_norm_epsilon", 1e-5)),
        "activation": activation,
        "bias_gelu_fusion": tanh,
        "use_bias_in_attn_linear": True,
        "use_bias_in_mlp": True,
        "no_weight_tying": not fields.take("tie_word_embeddings", True),
        "pos_emb": "learned",
        "attention_dropout": float(fields.take("attn_pdrop", 0.1)),
        "hidden_dropout": float(dropout),
        "init_method_std": float(fields.take("initializer_range", 0.02)),
    }


def falcon_keys(fields: Fields) -> dict[str, Any]:
    """`FalconConfig`."""
    fields.only("alibi", False)
    fields.only("apply_residual_connection_post_layernorm", False)
    fields.take("auto_map", None)
    hidden, heads = fields.take("hidden_size", 4544), fields.take("num_attention_heads", 71)
    new, parallel = fields.take("new_decoder_architecture", False), fields.take("parallel_attn", True)
    if new and not parallel:
        raise UserError(f"{fields.where}: parallel_attn: false cannot be expressed with new_decoder_architecture")
    kv, one = fields.take("num_kv_heads", heads), fields.take("multi_query", True)
    norms = fields.take("num_ln_in_parallel_attn", 2 if new else 1)
    if not new and parallel and norms != 1:
        raise UserError(f"{fields.where}: num_ln_in_parallel_attn: {norms} needs new_decoder_architecture")
    activation, tanh = fields.choose("activation", READ_PLAIN, "gelu")
    bias = fields.take("bias", False)
    return {
        "num_layers": fields.take("num_hidden_layers", 32),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_kv_heads": kv if new else 1 if one else heads,
        "intermediate_size": fields.take("ffn_hidden_size", 4 * hidden),
        "max_position_embeddings": fields.take("max_position_embeddings", 2048),
        "norm": "layernorm",
        "layernorm_epsilon": float(fields.take("layer_norm_epsilon", 1e-5)),
        "activation": activation,
        "bias_gelu_fusion": tanh,
        "gpt_j_residual": parallel,
        "gpt_j_tied": parallel and norms == 1,
        "use_bias_in_attn_linear": bias,
        "use_bias_in_mlp": bias,
        "no_weight_tying": not fields.take("tie_word_embeddings", True),
        "pos_emb": "rotary",
        **fields.rotary("rope_theta"),
        "attention_dropout": float(fields.take("attention_dropout", 0.0)),
        "hidden_dropout": float(fields.take("hidden_dropout", 0.0)),
        "init_method_std": float(fields.take("initializer_range", 0.02)),
    }


def phi3_keys(fields: Fields) -> dict[str, Any]:
    """`Phi3Config`."""
    fields.only("attention_bias", False)
    for name in ("auto_map", "original_max_position_embeddings"):
        fields.take(name, None)  # the second is read with scaled positions
    dropout = fields.take("resid_pdrop", 0.0)
    fields.only("embd_pdrop", dropout)
    window = fields.take("sliding_window", None)
    types = [FULL if window is None else SLIDING] * fields.take("num_hidden_layers")
    biases = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
    return {**decoder_keys(fields), **biases, "hidden_dropout": float(dropout), **windows(fields, window, types)}


for _kind, _keys in (
    ("qwen2", qwen2_keys),
    ("qwen3", qwen3_keys),
    ("olmo2", olmo2_keys),
    ("olmo3", olmo3_keys),
    ("gpt2", gpt2_keys),
    ("falcon", falcon_keys),
    ("phi3", phi3_keys),
):
    READERS.register(_kind)(Reader(_kind, _keys))
