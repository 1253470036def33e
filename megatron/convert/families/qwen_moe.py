"""Qwen2-MoE (and 1.5) and Qwen3-MoE ↔ `Qwen2MoeForCausalLM`, `Qwen3MoeForCausalLM`: attention of their dense relatives.

Experts are in all or some layers. Qwen2's have a shared expert with a gate next to the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.decoder import decoder_keys
from megatron.convert.parts.experts import all_layers, experts_config, experts_keys, experts_refusals, experts_table
from megatron.convert.parts.family import Family, TokenIds
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.refusals import (
    output_bias_refusals,
    pre_norm_refusals,
    same_window_refusals,
    width_refusals,
)
from megatron.convert.parts.windows import FULL, SLIDING, single_window, window_fields, window_keys
from megatron.errors import UserError

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def _config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    return {
        **experts_config(model, vocab_size, ids),
        "num_experts": model.moe_num_experts,
        "moe_intermediate_size": model.moe_intermediate_size,
        "norm_topk_prob": model.moe_normalize_topk,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, mlp in enumerate(model.layer_mlps) if mlp == "dense"],
    }


def qwen2_moe_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    fields, windows = _config(model, vocab_size, ids), window_fields(model)
    del fields["head_dim"]
    return {
        "model_type": "qwen2_moe",
        **fields,
        **windows,
        "use_sliding_window": SLIDING in windows["layer_types"],
        "max_window_layers": model.num_layers,
        "qkv_bias": model.use_bias_in_attn_linear,
        "shared_expert_intermediate_size": model.moe_shared_expert_size,
    }


def qwen3_moe_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        **_config(model, vocab_size, ids),
        "attention_bias": model.use_bias_in_attn_linear,
        "use_sliding_window": single_window(model) is not None,
        "sliding_window": single_window(model),
    }


def qwen2_moe_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*experts_refusals(model, dense=True, shared=True), *pre_norm_refusals(model), *width_refusals(model)]
    if model.use_bias_in_attn_linear and model.use_bias_in_attn_output:
        reasons.append("use_bias_in_attn_output (it has biases on queries, keys and values, not on the output)")
    return reasons


def qwen3_moe_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*experts_refusals(model, dense=True), *output_bias_refusals(model), *same_window_refusals(model)]
    if model.norm_placement != "pre":
        reasons.append(f"norm_placement: {model.norm_placement}")
    if not (model.use_separate_qk_norms and model.qk_norm_per_head):
        reasons.append("no use_separate_qk_norms with qk_norm_per_head (it normalises each head of queries and keys)")
    return reasons


def _sparse_layers(fields: Fields) -> list[int]:
    """Every `decoder_sparse_step`-th layer, without `mlp_only_layers`."""
    step, dense = fields.take("decoder_sparse_step", 1), fields.take("mlp_only_layers", [])
    return [layer for layer in all_layers(fields) if (layer + 1) % step == 0 and layer not in dense]


def qwen2_moe_keys(fields: Fields) -> dict[str, Any]:
    """`Qwen2MoeConfig`."""
    layers, window = fields.take("num_hidden_layers"), fields.take("sliding_window", 4096)
    first, used = fields.take("max_window_layers", 28), fields.take("use_sliding_window", False)
    types = [SLIDING if used and i < first and i % 2 == 0 else FULL for i in range(layers)]
    bias = fields.take("qkv_bias", True)
    experts = {"experts": 60, "per_token": 4, "coefficient": 0.001}
    return {
        **decoder_keys(fields),
        **experts_keys(fields, **experts, layers=_sparse_layers(fields)),
        "moe_normalize_topk": fields.take("norm_topk_prob", False),
        "moe_intermediate_size": fields.take("moe_intermediate_size", 1408),
        "moe_shared_expert_size": fields.take("shared_expert_intermediate_size", 5632),
        "moe_shared_expert_gate": True,
        "use_bias_in_attn_linear": bias,
        **({"use_bias_in_attn_output": False} if bias else {}),
        "use_bias_in_mlp": False,
        **window_keys(fields, window if used else None, fields.take("layer_types", types)),
    }


def qwen3_moe_keys(fields: Fields) -> dict[str, Any]:
    """`Qwen3MoeConfig`. Where it has a window, all layers have it; older versions left some out at the bottom."""
    layers, window = fields.take("num_hidden_layers"), fields.take("sliding_window", 4096)
    used, first = fields.take("use_sliding_window", False), fields.take("max_window_layers", 0)
    if used and first:
        raise UserError(f"{fields.where}: max_window_layers: {first} with use_sliding_window means two things")
    experts = {"experts": 128, "per_token": 8, "coefficient": 0.001}
    return {
        **decoder_keys(fields),
        **experts_keys(fields, **experts, layers=_sparse_layers(fields)),
        "moe_normalize_topk": fields.take("norm_topk_prob", False),
        "moe_intermediate_size": fields.take("moe_intermediate_size", 768),
        "use_separate_qk_norms": True,
        "qk_norm_per_head": True,
        "use_bias_in_attn_linear": fields.take("attention_bias", False),
        "use_bias_in_mlp": False,
        **window_keys(fields, window if used else None, [SLIDING if used else FULL] * layers),
    }


_TABLE = experts_table()
FAMILIES.register("qwen2_moe")(
    Family("Qwen2MoeForCausalLM", _TABLE, qwen2_moe_config, qwen2_moe_unsupported, {"qwen2_moe": qwen2_moe_keys})
)
FAMILIES.register("qwen3_moe")(
    Family("Qwen3MoeForCausalLM", _TABLE, qwen3_moe_config, qwen3_moe_unsupported, {"qwen3_moe": qwen3_moe_keys})
)
