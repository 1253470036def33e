"""Gemma 1, 2 and 3 ↔ `GemmaForCausalLM`, `Gemma2ForCausalLM`, `Gemma3ForCausalLM`: LLaMA's tensors and some more.

All scale the word embeddings by sqrt(hidden_size), and their norms multiply by 1 + weight. Gemma 2 has norms before and
behind attention and feed-forward, a window in every second layer, and caps on scores and logits. Gemma 3 has norms on
each head of queries and keys in place of the caps, a window in five of six layers, and other positions there. The text
part of Gemma 3 only; models with a vision tower are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.activations import READ_GATED, gated_refusals
from megatron.convert.parts.decoder import decoder_config, decoder_keys, decoder_table
from megatron.convert.parts.family import Family, TokenIds
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.positions import layered_positions
from megatron.convert.parts.refusals import (
    common_refusals,
    no_window_refusals,
    output_bias_refusals,
    pre_norm_refusals,
    rotary_refusals,
)
from megatron.convert.parts.windows import FULL, SLIDING, window_fields, window_keys
from megatron.errors import UserError

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


# What their classes want where no layer has a window.
UNUSED_WINDOW = 4096


def gemma_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    fields = decoder_config(model, vocab_size, ids)
    return {
        "model_type": "gemma",
        **fields,
        "hidden_activation": fields["hidden_act"],  # for transformers 4
        "attention_bias": model.use_bias_in_attn_linear,
    }


def gemma2_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    windows = window_fields(model)
    return {
        **gemma_config(model, vocab_size, ids),
        "model_type": "gemma2",
        **windows,
        "sliding_window": windows["sliding_window"] or UNUSED_WINDOW,
        "query_pre_attn_scalar": int(model.query_pre_attn_scalar or model.head_dim),
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
        "use_bidirectional_attention": False,
    }


def gemma3_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    fields = gemma2_config(model, vocab_size, ids)
    del fields["hidden_act"]
    full, base = fields["rope_parameters"], model.rotary_emb_base_local
    local = dict(full) if base is None else {"rope_type": "default", "rope_theta": float(base)}
    return {
        **fields,
        "model_type": "gemma3_text",
        "rope_parameters": {SLIDING: local, FULL: full},
        "rope_local_base_freq": local["rope_theta"],  # for transformers 4
    }


def gemma_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*_refusals(model, ()), *pre_norm_refusals(model)]
    if model.activation == "geglu":
        reasons.append("activation: geglu (its config's gelu means the tanh approximation: geglu_tanh)")
    return [*reasons, *no_window_refusals(model)]


def gemma2_unsupported(model: ModelConfig) -> list[str]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
    reasons = [*_refusals(model, caps), *_sandwich_refusals(model)]
    if model.use_separate_qk_norms:
        reasons.append("use_separate_qk_norms (it has no norms on queries and keys)")
    return reasons


def gemma3_unsupported(model: ModelConfig) -> list[str]:
    expressed = ("final_logit_softcapping", "query_pre_attn_scalar", "rotary_emb_base_local")
    reasons = [*_refusals(model, expressed), *_sandwich_refusals(model)]
    if not (model.use_separate_qk_norms and model.qk_norm_per_head):
        reasons.append("no use_separate_qk_norms with qk_norm_per_head (it normalises each head of queries and keys)")
    return reasons


def _refusals(model: ModelConfig, expressed: tuple[str, ...]) -> list[str]:
    """Of all three; `expressed`: keys that this one has."""
    reasons = common_refusals(model, expressed=("scale_embedding", *expressed))
    if model.norm != "rmsnorm_unit_offset":
        reasons.append(f"norm: {model.norm} (it has rmsnorm_unit_offset only)")
    if not model.scale_embedding:
        reasons.append("scale_embedding: false (it multiplies word embeddings by sqrt(hidden_size))")
    reasons += gated_refusals(model)
    if model.gpt_j_residual:
        reasons.append("gpt_j_residual (its residuals are sequential)")
    if model.rotary_pct != 1.0:
        reasons.append(f"rotary_pct: {model.rotary_pct} (it rotates whole heads)")
    if model.hidden_dropout:
        reasons.append(f"hidden_dropout: {model.hidden_dropout} (it has none)")
    if model.use_bias_in_mlp:
        reasons.append("use_bias_in_mlp (it has no biases there)")
    return [*reasons, *rotary_refusals(model), *output_bias_refusals(model)]


def _sandwich_refusals(model: ModelConfig) -> list[str]:
    """Of Gemma 2 and 3."""
    reasons = []
    if model.norm_placement != "sandwich":
        reasons.append(f"norm_placement: {model.norm_placement} (its norms are before and behind: sandwich)")
    if (scalar := model.query_pre_attn_scalar) is not None and scalar != int(scalar):
        reasons.append(f"query_pre_attn_scalar: {scalar} (it must be whole there)")
    if model.hidden_size % model.num_attention_heads:
        reasons.append(f"hidden_size: {model.hidden_size} (its heads must divide it)")
    return reasons


def _shared_keys(fields: Fields, rotary: dict[str, Any] | None = None) -> dict[str, Any]:
    """What Gemma 1, 2 and 3 have in common; `rotary` as in `decoder_keys`."""
    fields.only("use_bidirectional_attention", False)
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
    """`GemmaConfig`. The `gelu` of the first files is its tanh approximation, in transformers too."""
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
        **window_keys(fields, window, fields.take("layer_types", every_second)),
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
    """`Gemma3TextConfig`. transformers' class has no cap on scores, whatever the field is."""
    fields.only("attn_logit_softcapping", None)
    layers, window = fields.take("num_hidden_layers"), fields.take("sliding_window", 4096)
    fields.take("_sliding_window_pattern", None)  # layer_types say the same
    full = fields.take("sliding_window_pattern", 6)
    types = fields.take("layer_types", [SLIDING if (i + 1) % full else FULL for i in range(layers)])
    spans = window_keys(fields, window, types)
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
        f"{fields.where}: model_type: gemma3 has a vision tower, which cannot be expressed here;"
        " documentation/conversion.md shows how to take the text model (model_type: gemma3_text) out of it"
    )


FAMILIES.register("gemma")(
    Family("GemmaForCausalLM", decoder_table, gemma_config, gemma_unsupported, {"gemma": gemma_keys})
)
FAMILIES.register("gemma2")(
    Family("Gemma2ForCausalLM", decoder_table, gemma2_config, gemma2_unsupported, {"gemma2": gemma2_keys})
)
_GEMMA3 = {"gemma3_text": gemma3_keys, "gemma3": vision_keys}
FAMILIES.register("gemma3")(Family("Gemma3ForCausalLM", decoder_table, gemma3_config, gemma3_unsupported, _GEMMA3))
