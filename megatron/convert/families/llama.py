"""LLaMA ↔ `LlamaForCausalLM`; what its relatives share with it is in parts/decoder.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.decoder import decoder_config, decoder_keys, decoder_refusals, decoder_table
from megatron.convert.parts.family import Family, TokenIds
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.refusals import no_window_refusals, output_bias_refusals, pre_norm_refusals

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def llama_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    return {
        "model_type": "llama",
        **decoder_config(model, vocab_size, ids),
        "attention_bias": model.use_bias_in_attn_linear,
        "mlp_bias": model.use_bias_in_mlp,
    }


def llama_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*decoder_refusals(model), *pre_norm_refusals(model), *output_bias_refusals(model)]
    return [*reasons, *no_window_refusals(model, hint="; try --architecture mistral")]


def llama_keys(fields: Fields) -> dict[str, Any]:
    """`LlamaConfig`."""
    biases = {
        "use_bias_in_attn_linear": fields.take("attention_bias", False),
        "use_bias_in_mlp": fields.take("mlp_bias", False),
    }
    return {**decoder_keys(fields), **biases}


FAMILIES.register("llama")(
    Family("LlamaForCausalLM", decoder_table, llama_config, llama_unsupported, {"llama": llama_keys})
)
