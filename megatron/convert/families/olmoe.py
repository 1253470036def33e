"""OLMoE ↔ `OlmoeForCausalLM`: experts in all layers, norms on queries and keys over all heads together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.decoder import decoder_keys
from megatron.convert.parts.experts import all_layers, experts_config, experts_keys, experts_refusals, experts_table
from megatron.convert.parts.family import Family, TokenIds
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.refusals import no_window_refusals, output_bias_refusals, width_refusals

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def olmoe_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    fields = experts_config(model, vocab_size, ids)
    del fields["head_dim"]
    return {
        "model_type": "olmoe",
        **fields,
        "intermediate_size": model.moe_intermediate_size,
        "num_experts": model.moe_num_experts,
        "norm_topk_prob": model.moe_normalize_topk,
        "attention_bias": model.use_bias_in_attn_linear,
        "clip_qkv": None,
    }


def olmoe_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*experts_refusals(model, dense=False), *output_bias_refusals(model), *width_refusals(model)]
    if model.norm_placement != "pre":
        reasons.append(f"norm_placement: {model.norm_placement}")
    if not model.use_separate_qk_norms or model.qk_norm_per_head:
        reasons.append("no use_separate_qk_norms over all heads (it normalises queries and keys so)")
    return [*reasons, *no_window_refusals(model)]


def olmoe_keys(fields: Fields) -> dict[str, Any]:
    """`OlmoeConfig`."""
    fields.only("clip_qkv", None)
    experts = {"experts": 64, "per_token": 8, "coefficient": 0.01}
    return {
        **decoder_keys(fields),
        **experts_keys(fields, **experts, layers=all_layers(fields)),
        "moe_normalize_topk": fields.take("norm_topk_prob", False),
        "rms_norm_epsilon": float(fields.take("rms_norm_eps", 1e-5)),
        "use_qk_layernorm": True,
        "use_separate_qk_norms": True,
        "use_bias_in_attn_linear": fields.take("attention_bias", False),
        "use_bias_in_mlp": False,
    }


FAMILIES.register("olmoe")(
    Family("OlmoeForCausalLM", experts_table(), olmoe_config, olmoe_unsupported, {"olmoe": olmoe_keys})
)
