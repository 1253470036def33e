"""Readers of config.json of the families whose tables are in gemma.py and phi2.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.convert.families.read_families import windows
from megatron.convert.parts.activations import READ_GATED, READ_PLAIN
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.read_config import READERS, Reader, decoder_keys
from megatron.convert.parts.read_positions import layered_positions
from megatron.convert.parts.windows import FULL, SLIDING
from megatron.errors import UserError


def _shared_keys(fields: Fields, rotary: dict[str, Any] | None = None) -> dict[str, Any]:
    """What Gemma 1, 2 and 3 have in common; `rotary` as in `decoder_keys`."""
    for name in ("cache_implementation", "cache_position"):
        fields.take(name, None)  # of generation
    fields.only("use_bidirectional_attention", False)
    fields.take("hidden_act", None)
    return {
        **decoder_keys(fields, rotary),
        "head_dim": fields.take("head_dim", 256),
        "norm": "rmsnorm_unit_offset",
        "scale_embedding": True,
        "use_bias_in_attn_linear": fields.take("attention_bias", False),
        "use_bias_in_mlp": False,
        "no_weight_tying": not fields.take("tie_word_embeddings", True),
    }


def gemma_keys(fields: Fields) -> dict[str, Any]:
    """`GemmaConfig`. The first files say `gelu` and mean its tanh approximation, as transformers takes them."""
    name = "hidden_act" if fields.take("hidden_activation", None) is None else "hidden_activation"
    return {
        **_shared_keys(fields),
        "activation": fields.choose(name, {**READ_GATED, "gelu": "geglu_tanh"}, "gelu_pytorch_tanh"),
    }


def gemma2_keys(fields: Fields) -> dict[str, Any]:
    """`Gemma2Config`."""
    layers, window = fields.take("num_hidden_layers"), fields.take("sliding_window", 4096)
    fields.only("sliding_window_size", window)
    every_second = [FULL if i % 2 else SLIDING for i in range(layers)]
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {
        **_sandwich_keys(fields, caps),
        **windows(fields, window, fields.take("layer_types", every_second)),
    }


def _sandwich_keys(
    fields: Fields, caps: Mapping[str, float | None], rotary: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Of Gemma 2 and 3. `caps`: their defaults where the field is missing; null is no cap."""
    return {
        **_shared_keys(fields, rotary),
        "activation": fields.choose("hidden_activation", READ_GATED, "gelu_pytorch_tanh"),
        "norm_placement": "sandwich",
        "query_pre_attn_scalar": float(fields.take("query_pre_attn_scalar", 256)),
        **{name: fields.take_or_null(name, default) for name, default in caps.items()},
    }


def gemma3_keys(fields: Fields) -> dict[str, Any]:
    """`Gemma3TextConfig`. transformers' class has no cap on scores, whatever the field says."""
    fields.only("attn_logit_softcapping", None)
    layers, window = fields.take("num_hidden_layers"), fields.take("sliding_window", 4096)
    fields.take("_sliding_window_pattern", None)  # beside layer_types, which say it
    full = fields.take("sliding_window_pattern", 6)
    types = fields.take("layer_types", [SLIDING if (i + 1) % full else FULL for i in range(layers)])
    spans = windows(fields, window, types)
    bases = (fields.take("rope_theta", 1_000_000.0), fields.take("rope_local_base_freq", 10_000.0))
    rotary, local = layered_positions(fields, *bases)
    return {
        **_sandwich_keys(fields, {"final_logit_softcapping": None}, rotary),
        **spans,
        **({"rotary_emb_base_local": local} if local and spans else {}),
        "use_separate_qk_norms": True,
        "qk_norm_per_head": True,
    }


def vision_keys(fields: Fields) -> dict[str, Any]:
    """`Gemma3Config`: text and pictures."""
    raise UserError(
        f"{fields.where}: model_type: gemma3 has a vision tower, which cannot be expressed here; how to take the text"
        " model out of it (model_type: gemma3_text, which is converted) says documentation/conversion.md"
    )


def phi_keys(fields: Fields) -> dict[str, Any]:
    """`PhiConfig`: Phi-1, 1.5 and 2."""
    fields.take("auto_map", None)
    fields.only("qk_layernorm", False)
    fields.only("tie_word_embeddings", False)
    activation, tanh = fields.choose("hidden_act", READ_PLAIN, "gelu_new")
    heads, residual = fields.take("num_attention_heads", 32), float(fields.take("resid_pdrop", 0.0))
    embedded = float(fields.take("embd_pdrop", 0.0))
    return {
        "num_layers": fields.take("num_hidden_layers", 24),
        "hidden_size": fields.take("hidden_size", 2048),
        "num_attention_heads": heads,
        "num_kv_heads": fields.take("num_key_value_heads", heads),
        "intermediate_size": fields.take("intermediate_size", 8192),
        "max_position_embeddings": fields.take("max_position_embeddings", 2048),
        "norm": "layernorm",
        "layernorm_epsilon": float(fields.take("layer_norm_eps", 1e-5)),
        "activation": activation,
        "bias_gelu_fusion": tanh,
        "gpt_j_residual": True,
        "gpt_j_tied": True,
        "use_bias_in_attn_linear": True,
        "use_bias_in_mlp": True,
        "use_bias_in_head": True,
        "no_weight_tying": True,
        "pos_emb": "rotary",
        **fields.rotary("rope_theta", fraction_default=0.5),
        "attention_dropout": float(fields.take("attention_dropout", 0.0)),
        "hidden_dropout": residual,
        **({"embedding_dropout": embedded} if embedded != residual else {}),
        "init_method_std": float(fields.take("initializer_range", 0.02)),
    }


READERS.register("gemma")(Reader("gemma", gemma_keys))
READERS.register("gemma2")(Reader("gemma2", gemma2_keys))
READERS.register("gemma3_text")(Reader("gemma3", gemma3_keys))
READERS.register("gemma3")(Reader("gemma3", vision_keys))
READERS.register("phi")(Reader("phi", phi_keys))
