"""Qwen2 (and 2.5) and Qwen3 ↔ `Qwen2ForCausalLM`, `Qwen3ForCausalLM`: LLaMA's tensors and some more.

Qwen2 has biases on queries, keys and values but not on the output. Qwen3 normalises every head of queries and keys, and
its heads may be wider than hidden_size / heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.convert.families.llama import common_config, decoder_refusals, table
from megatron.convert.parts.family import (
    FAMILIES,
    Family,
    TokenIds,
    output_bias_refusals,
    pre_norm_refusals,
    width_refusals,
)
from megatron.convert.parts.windows import window_fields

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def qwen2_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    fields = common_config(model, vocab_size, ids)
    del fields["head_dim"]
    return {"model_type": "qwen2", **fields, **_windows(model)}


def qwen3_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        **common_config(model, vocab_size, ids),
        "attention_bias": model.use_bias_in_attn_linear,
        **_windows(model),
    }


def _windows(model: ModelConfig) -> dict[str, Any]:
    fields = window_fields(model)
    sliding = fields["sliding_window"] is not None
    first = fields["layer_types"].index("sliding_attention") if sliding else model.num_layers
    # max_window_layers is what transformers 4 knows: the number of layers at the bottom with full attention.
    return {**fields, "use_sliding_window": sliding, "max_window_layers": first}


def qwen2_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*decoder_refusals(model), *pre_norm_refusals(model), *width_refusals(model)]
    if not model.use_bias_in_attn_linear or model.use_bias_in_attn_output:
        reasons.append(
            "attention biases other than use_bias_in_attn_linear: true with use_bias_in_attn_output: false (it has them"
            " on queries, keys and values, not on the output)"
        )
    return [*reasons, *_mlp_bias(model)]


def qwen3_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*decoder_refusals(model), *output_bias_refusals(model)]
    if model.norm_placement != "pre":
        reasons.append(f"norm_placement: {model.norm_placement}")
    if not (model.use_separate_qk_norms and model.qk_norm_per_head):
        reasons.append("no use_separate_qk_norms with qk_norm_per_head (it normalises each head of queries and keys)")
    return [*reasons, *_mlp_bias(model)]


def _mlp_bias(model: ModelConfig) -> list[str]:
    return ["use_bias_in_mlp (it has no biases there)"] if model.use_bias_in_mlp else []


FAMILIES.register("qwen2")(Family("Qwen2ForCausalLM", table, qwen2_config, qwen2_unsupported))
FAMILIES.register("qwen3")(Family("Qwen3ForCausalLM", table, qwen3_config, qwen3_unsupported))
