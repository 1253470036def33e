"""Readers of config.json of the families whose tables are in moe_families.py."""

from __future__ import annotations

from typing import Any

from megatron.convert.families.read_families import windows
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.read_config import READERS, Reader, decoder_keys, no_biases_one_window
from megatron.convert.parts.windows import FULL, SLIDING
from megatron.errors import UserError


def _expert_keys(
    fields: Fields, *, experts: int, per_token: int, coefficient: float, layers: list[int]
) -> dict[str, Any]:
    """What all have; the first three are the defaults of transformers' class, `layers` those that have experts."""
    fields.take("output_router_logits", None)  # whether training with transformers adds the balance loss
    named = {name: fields.take(name, None) for name in ("num_experts", "num_local_experts")}
    counts = {name: count for name, count in named.items() if count is not None}
    if len(set(counts.values())) > 1:
        raise UserError(f"{fields.where}: num_experts and num_local_experts differ: {counts}")
    if not layers:
        raise UserError(f"{fields.where}: no layer has experts; such a model cannot be expressed as this one")
    total = fields.take("num_hidden_layers")
    # transformers adds one balance loss of all layers together, ours are summed over layers
    balance = fields.take("router_aux_loss_coef", coefficient) / len(layers)
    return {
        "moe_num_experts": next(iter(counts.values()), experts),
        "moe_top_k": fields.take("num_experts_per_tok", per_token),
        "moe_router_type": "topk",
        "moe_aux_loss_coeff": float(f"{balance:.12g}"),
        **({} if len(layers) == total else {"moe_layers": layers}),
    }


def _all_layers(fields: Fields) -> list[int]:
    return list(range(fields.take("num_hidden_layers")))


def _sparse_layers(fields: Fields) -> list[int]:
    """Qwen's: every `decoder_sparse_step`-th layer, without `mlp_only_layers`."""
    step, dense = fields.take("decoder_sparse_step", 1), fields.take("mlp_only_layers", [])
    return [layer for layer in _all_layers(fields) if (layer + 1) % step == 0 and layer not in dense]


def mixtral_keys(fields: Fields) -> dict[str, Any]:
    """`MixtralConfig`."""
    fields.only("router_jitter_noise", 0.0)
    experts = {"experts": 8, "per_token": 2, "coefficient": 0.001}
    return {
        **decoder_keys(fields, fields.rotary("rope_theta", base_default=1000000.0)),
        **no_biases_one_window(fields, None),
        **_expert_keys(fields, **experts, layers=_all_layers(fields)),
        "moe_normalize_topk": True,
    }


def olmoe_keys(fields: Fields) -> dict[str, Any]:
    """`OlmoeConfig`."""
    fields.only("clip_qkv", None)
    experts = {"experts": 64, "per_token": 8, "coefficient": 0.01}
    return {
        **decoder_keys(fields),
        **_expert_keys(fields, **experts, layers=_all_layers(fields)),
        "moe_normalize_topk": fields.take("norm_topk_prob", False),
        "rms_norm_epsilon": float(fields.take("rms_norm_eps", 1e-5)),
        "use_separate_qk_norms": True,
        "use_bias_in_attn_linear": fields.take("attention_bias", False),
        "use_bias_in_mlp": False,
    }


def qwen2_moe_keys(fields: Fields) -> dict[str, Any]:
    """`Qwen2MoeConfig`."""
    layers, window = fields.take("num_hidden_layers"), fields.take("sliding_window", 4096)
    first, used = fields.take("max_window_layers", 28), fields.take("use_sliding_window", False)
    types = [SLIDING if used and i < first and i % 2 == 0 else FULL for i in range(layers)]
    bias = fields.take("qkv_bias", True)
    experts = {"experts": 60, "per_token": 4, "coefficient": 0.001}
    return {
        **decoder_keys(fields),
        **_expert_keys(fields, **experts, layers=_sparse_layers(fields)),
        "moe_normalize_topk": fields.take("norm_topk_prob", False),
        "moe_intermediate_size": fields.take("moe_intermediate_size", 1408),
        "moe_shared_expert_size": fields.take("shared_expert_intermediate_size", 5632),
        "moe_shared_expert_gate": True,
        "use_bias_in_attn_linear": bias,
        **({"use_bias_in_attn_output": False} if bias else {}),
        "use_bias_in_mlp": False,
        **windows(fields, window if used else None, fields.take("layer_types", types)),
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
        **_expert_keys(fields, **experts, layers=_sparse_layers(fields)),
        "moe_normalize_topk": fields.take("norm_topk_prob", False),
        "moe_intermediate_size": fields.take("moe_intermediate_size", 768),
        "use_separate_qk_norms": True,
        "qk_norm_per_head": True,
        "use_bias_in_attn_linear": fields.take("attention_bias", False),
        "use_bias_in_mlp": False,
        **windows(fields, window if used else None, [SLIDING if used else FULL] * layers),
    }


READERS.register("mixtral")(Reader("mixtral", mixtral_keys))
READERS.register("olmoe")(Reader("olmoe", olmoe_keys))
READERS.register("qwen2_moe")(Reader("qwen2_moe", qwen2_moe_keys))
READERS.register("qwen3_moe")(Reader("qwen3_moe", qwen3_moe_keys))
