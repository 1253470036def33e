"""Phi-3 (and Phi-4) ↔ `Phi3ForCausalLM`: LLaMA with fused projections, [Q | K | V] and [gate ; up].

The models for long texts (128k) have other positions in short texts than in long ones: longrope.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.decoder import decoder_config, decoder_keys, decoder_refusals
from megatron.convert.parts.family import WORD_EMBEDDINGS, Constant, Family, Rule, TokenIds
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.positions import rope_fields
from megatron.convert.parts.refusals import pre_norm_refusals, same_window_refusals, width_refusals
from megatron.convert.parts.transforms import Copy, SwapHalves
from megatron.convert.parts.windows import FULL, SLIDING, single_window, window_keys

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def table(model: ModelConfig) -> list[Rule | Constant]:
    rules: list[Rule | Constant] = [Rule(WORD_EMBEDDINGS, ("model.embed_tokens.weight",))]
    for block in range(model.num_layers):
        ours, theirs = f"{block + 2}.", f"model.layers.{block}."
        rules += [
            Rule(f"{ours}{name}.scale", (f"{theirs}{name}.weight",))
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        rules += [
            Rule(f"{ours}{name}.weight", (f"{theirs}{their_name}.weight",), transform)
            for name, their_name, transform in (
                ("attention.query_key_value", "self_attn.qkv_proj", Copy()),
                ("attention.dense", "self_attn.o_proj", Copy()),
                ("mlp.linear1", "mlp.gate_up_proj", SwapHalves()),
                ("mlp.linear2", "mlp.down_proj", Copy()),
            )
        ]
    rules.append(Rule(f"{model.num_layers + 3}.norm.scale", ("model.norm.weight",)))
    if model.no_weight_tying:
        rules.append(Rule(f"{model.num_layers + 4}.final_linear.weight", ("lm_head.weight",)))
    return rules


def config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    fields = decoder_config(model, vocab_size, ids)
    del fields["head_dim"]
    scaling = dict(model.rope_scaling or {})
    length = scaling.pop("original_max_position_embeddings", model.max_position_embeddings)
    return {
        "model_type": "phi3",
        **fields,
        **rope_fields(model, fraction=True),
        # as its own files have them: transformers 4 wants exactly these fields
        **({"rope_scaling": {"type": scaling.pop("rope_type"), **scaling}} if scaling else {}),
        "original_max_position_embeddings": length,
        "sliding_window": single_window(model),
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
    }


def unsupported(model: ModelConfig) -> list[str]:
    reasons = [
        *decoder_refusals(model, rotary_pct=True, hidden_dropout=True),
        *pre_norm_refusals(model),
        *width_refusals(model),
    ]
    if model.use_bias_in_attn_linear or model.use_bias_in_mlp:
        reasons.append("use_bias_in_attn_linear or use_bias_in_mlp (it has no biases)")
    if model.rope_scaling and model.rope_scaling["rope_type"] != "longrope":
        reasons.append("rope_scaling (its positions are scaled as longrope or not at all)")
    return [*reasons, *same_window_refusals(model)]


def phi3_keys(fields: Fields) -> dict[str, Any]:
    """`Phi3Config`."""
    fields.only("attention_bias", False)
    fields.take("original_max_position_embeddings", None)  # read with scaled positions
    dropout = fields.take("resid_pdrop", 0.0)
    window = fields.take("sliding_window", None)
    types = [FULL if window is None else SLIDING] * fields.take("num_hidden_layers")
    biases = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
    return {**decoder_keys(fields), **biases, "hidden_dropout": float(dropout), **window_keys(fields, window, types)}


FAMILIES.register("phi3")(Family("Phi3ForCausalLM", table, config, unsupported, {"phi3": phi3_keys}))
