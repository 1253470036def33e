"""Mixtral ↔ `MixtralForCausalLM`: Mistral's attention, experts in all layers, their weights always normalised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.decoder import decoder_keys
from megatron.convert.parts.experts import all_layers, experts_config, experts_keys, experts_refusals, experts_table
from megatron.convert.parts.family import Family, TokenIds
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.refusals import pre_norm_refusals, same_window_refusals
from megatron.convert.parts.windows import single_window, single_window_keys

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def mixtral_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    return {
        "model_type": "mixtral",
        **experts_config(model, vocab_size, ids),
        "intermediate_size": model.moe_intermediate_size,
        "num_local_experts": model.moe_num_experts,
        "router_jitter_noise": 0.0,
        "sliding_window": single_window(model),
    }


def mixtral_unsupported(model: ModelConfig) -> list[str]:
    reasons = [
        *experts_refusals(model, dense=False, normalised=True),
        *pre_norm_refusals(model),
        *same_window_refusals(model),
    ]
    if model.use_bias_in_attn_linear:
        reasons.append("use_bias_in_attn_linear (it has no biases)")
    return reasons


def mixtral_keys(fields: Fields) -> dict[str, Any]:
    """`MixtralConfig`."""
    fields.only("router_jitter_noise", 0.0)
    experts = {"experts": 8, "per_token": 2, "coefficient": 0.001}
    return {
        **decoder_keys(fields, fields.rotary("rope_theta", base_default=1000000.0)),
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
        **single_window_keys(fields, None),
        **experts_keys(fields, **experts, layers=all_layers(fields)),
        "moe_normalize_topk": True,
    }


_TABLE = experts_table(("block_sparse_moe", "w1", "w3", "w2"))
FAMILIES.register("mixtral")(
    Family("MixtralForCausalLM", _TABLE, mixtral_config, mixtral_unsupported, {"mixtral": mixtral_keys})
)
