"""Qwen2 (and 2.5) and Qwen3 ↔ `Qwen2ForCausalLM`, `Qwen3ForCausalLM`: LLaMA's tensors and some more.

Qwen2 has biases on queries, keys and values but not on the output. Qwen3 normalises every head of queries and keys, and
its heads may be wider than hidden_size / heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.decoder import decoder_config, decoder_keys, decoder_refusals, decoder_table
from megatron.convert.parts.family import Family, TokenIds
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.refusals import output_bias_refusals, pre_norm_refusals, width_refusals
from megatron.convert.parts.windows import FULL, SLIDING, window_fields, window_keys

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def qwen2_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    fields = decoder_config(model, vocab_size, ids)
    del fields["head_dim"]
    return {"model_type": "qwen2", **fields, **_windows(model)}


def qwen3_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        **decoder_config(model, vocab_size, ids),
        "attention_bias": model.use_bias_in_attn_linear,
        **_windows(model),
    }


def _windows(model: ModelConfig) -> dict[str, Any]:
    fields = window_fields(model)
    sliding = fields["sliding_window"] is not None
    first = fields["layer_types"].index(SLIDING) if sliding else model.num_layers
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


def qwen2_keys(fields: Fields) -> dict[str, Any]:
    """`Qwen2Config`."""
    fields.only("use_mrope", False)
    biases = {"use_bias_in_attn_linear": True, "use_bias_in_attn_output": False, "use_bias_in_mlp": False}
    return {**decoder_keys(fields), **biases, **_upper_window_keys(fields)}


def qwen3_keys(fields: Fields) -> dict[str, Any]:
    """`Qwen3Config`. Its heads are 128 wide by default."""
    return {
        **decoder_keys(fields),
        "head_dim": fields.take("head_dim", 128),
        "use_separate_qk_norms": True,
        "qk_norm_per_head": True,
        "use_bias_in_attn_linear": fields.take("attention_bias", False),
        "use_bias_in_mlp": False,
        **_upper_window_keys(fields),
    }


def _upper_window_keys(fields: Fields) -> dict[str, Any]:
    """Qwen's: a window in the layers above `max_window_layers`, if at all."""
    layers = fields.take("num_hidden_layers")
    window, first = fields.take("sliding_window", 4096), fields.take("max_window_layers", 28)
    if not fields.take("use_sliding_window", False):
        window = None
    types = [SLIDING if window is not None and i >= first else FULL for i in range(layers)]
    return window_keys(fields, window, fields.take("layer_types", types))


FAMILIES.register("qwen2")(
    Family("Qwen2ForCausalLM", decoder_table, qwen2_config, qwen2_unsupported, {"qwen2": qwen2_keys})
)
FAMILIES.register("qwen3")(
    Family("Qwen3ForCausalLM", decoder_table, qwen3_config, qwen3_unsupported, {"qwen3": qwen3_keys})
)
