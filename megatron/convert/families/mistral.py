"""Mistral ↔ `MistralForCausalLM`: LLaMA's tensors, the same window in every layer, no biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.decoder import decoder_config, decoder_keys, decoder_refusals, decoder_table
from megatron.convert.parts.family import Family, TokenIds
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.refusals import pre_norm_refusals, same_window_refusals
from megatron.convert.parts.windows import single_window, single_window_keys

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def mistral_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    fields = decoder_config(model, vocab_size, ids)
    return {"model_type": "mistral", **fields, "sliding_window": single_window(model)}


def mistral_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*decoder_refusals(model), *pre_norm_refusals(model), *same_window_refusals(model)]
    if model.use_bias_in_attn_linear or model.use_bias_in_mlp:
        reasons.append("use_bias_in_attn_linear or use_bias_in_mlp (it has no biases)")
    return reasons


def mistral_keys(fields: Fields) -> dict[str, Any]:
    """`MistralConfig`. Where the window is left out it is 4096."""
    biases = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
    return {**decoder_keys(fields), **biases, **single_window_keys(fields, 4096)}


FAMILIES.register("mistral")(
    Family("MistralForCausalLM", decoder_table, mistral_config, mistral_unsupported, {"mistral": mistral_keys})
)
