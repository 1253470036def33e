"""OLMo 2 and 3 ↔ `Olmo2ForCausalLM`, `Olmo3ForCausalLM`: LLaMA's tensors with other norms.

Both normalise what attention and feed-forward give (norm_placement: olmo3), and queries and keys over all heads
together. OLMo 3 has a sliding window in three of four layers, whose positions are not scaled with the others'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.decoder import decoder_config, decoder_keys, decoder_refusals, decoder_table
from megatron.convert.parts.family import Family, TokenIds
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.positions import layered_positions
from megatron.convert.parts.refusals import no_window_refusals, output_bias_refusals, width_refusals
from megatron.convert.parts.windows import FULL, SLIDING, window_fields, window_keys

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def olmo2_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    fields = decoder_config(model, vocab_size, ids)
    del fields["head_dim"]
    return {"model_type": "olmo2", **fields, "attention_bias": model.use_bias_in_attn_linear}


def olmo3_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    fields = olmo2_config(model, vocab_size, ids)
    rope, windows, local = fields["rope_parameters"], window_fields(model), model.rotary_emb_base_local
    sliding = dict(rope) if local is None else {"rope_type": "default", "rope_theta": float(local)}
    return {
        **fields,
        "model_type": "olmo3",
        **windows,
        "sliding_window": windows["sliding_window"] or 4096,  # transformers wants one where no layer uses it, too
        "rope_parameters": {SLIDING: sliding, FULL: dict(rope)},
    }


def olmo3_unsupported(model: ModelConfig) -> list[str]:
    reasons = [
        *decoder_refusals(model, expressed=("rotary_emb_base_local",)),
        *output_bias_refusals(model),
        *width_refusals(model),
    ]
    if model.norm_placement != "olmo3":
        reasons.append(f"norm_placement: {model.norm_placement} (its norms are behind attention and feed-forward)")
    if not model.use_separate_qk_norms or model.qk_norm_per_head:
        reasons.append("no use_separate_qk_norms over all heads (it normalises queries and keys so)")
    if model.use_bias_in_mlp:
        reasons.append("use_bias_in_mlp (it has no biases there)")
    return reasons


def olmo2_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*olmo3_unsupported(model), *no_window_refusals(model, hint="; try --architecture olmo3")]
    if model.rotary_emb_base_local is not None:
        reasons.append("rotary_emb_base_local (its layers have the same positions)")
    return reasons


def olmo2_keys(fields: Fields, rotary: dict[str, Any] | None = None) -> dict[str, Any]:
    """`Olmo2Config`."""
    return {
        **decoder_keys(fields, rotary),
        "norm_placement": "olmo3",
        "use_qk_layernorm": True,
        "use_separate_qk_norms": True,
        "use_bias_in_attn_linear": fields.take("attention_bias", False),
        "use_bias_in_mlp": False,
    }


def olmo3_keys(fields: Fields) -> dict[str, Any]:
    """`Olmo3Config`."""
    layers, base = fields.take("num_hidden_layers"), fields.take("rope_theta", 500000.0)
    types = fields.take("layer_types", [FULL if (i + 1) % 4 == 0 else SLIDING for i in range(layers)])
    spans = window_keys(fields, fields.take("sliding_window", 4096), types)
    rotary, local = layered_positions(fields, base, base)
    return {**olmo2_keys(fields, rotary), **spans, **({"rotary_emb_base_local": local} if local and spans else {})}


FAMILIES.register("olmo2")(
    Family("Olmo2ForCausalLM", decoder_table, olmo2_config, olmo2_unsupported, {"olmo2": olmo2_keys})
)
FAMILIES.register("olmo3")(
    Family("Olmo3ForCausalLM", decoder_table, olmo3_config, olmo3_unsupported, {"olmo3": olmo3_keys})
)
