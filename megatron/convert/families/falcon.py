"""Falcon ↔ `FalconForCausalLM`: rotary positions, LayerNorm, parallel blocks, biases everywhere or nowhere.

| model  | config there                        | fused QKV there                             | norms of a block        |
|--------|-------------------------------------|---------------------------------------------|-------------------------|
| 7B     | multi_query                         | [Q | K | V], one key/value head             | input_layernorm         |
| 40B    | new_decoder_architecture            | per key/value head: its queries, k, v       | ln_attn, ln_mlp         |
| others | neither, parallel_attn or not       | per head: q, k, v                           | input_layernorm (, ...) |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.activations import READ_PLAIN, plain_name, plain_refusals
from megatron.convert.parts.family import WORD_EMBEDDINGS, Constant, Family, Rule, TokenIds, common_fields
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.positions import rope_fields
from megatron.convert.parts.refusals import (
    common_refusals,
    no_window_refusals,
    output_bias_refusals,
    pre_norm_refusals,
    rotary_refusals,
    width_refusals,
)
from megatron.convert.parts.transforms import Copy, PerGroup, PerHead, Transform
from megatron.errors import UserError

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def new_architecture(model: ModelConfig) -> bool:
    """Whether only the decoder of the 40B model can express it: two norms in parallel, or grouped queries."""
    grouped = 1 < model.num_kv_heads < model.num_attention_heads
    return model.gpt_j_residual and (not model.gpt_j_tied or grouped)


def table(model: ModelConfig) -> list[Rule | Constant]:
    rules: list[Rule | Constant] = [Rule(WORD_EMBEDDINGS, ("transformer.word_embeddings.weight",))]
    for block in range(model.num_layers):
        rules += _block(model, block)
    rules += _norm(f"{model.num_layers + 3}.norm", "transformer.ln_f")
    if model.no_weight_tying:
        rules.append(Rule(f"{model.num_layers + 4}.final_linear.weight", ("lm_head.weight",)))
    return rules


def _norm(ours: str, theirs: str) -> list[Rule | Constant]:
    return [Rule(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in ("weight", "bias")]


def _block(model: ModelConfig, block: int) -> list[Rule | Constant]:
    ours, theirs = f"{block + 2}.", f"transformer.h.{block}."
    two = model.gpt_j_residual and not model.gpt_j_tied
    rules = _norm(f"{ours}input_layernorm", f"{theirs}{'ln_attn' if two else 'input_layernorm'}")
    if not model.gpt_j_tied:
        rules += _norm(f"{ours}post_attention_layernorm", f"{theirs}{'ln_mlp' if two else 'post_attention_layernorm'}")
    for name, their_name, transform in (
        ("attention.query_key_value", "self_attention.query_key_value", _fused(model)),
        ("attention.dense", "self_attention.dense", Copy()),
        ("mlp.linear1", "mlp.dense_h_to_4h", Copy()),
        ("mlp.linear2", "mlp.dense_4h_to_h", Copy()),
    ):
        for kind in ("weight", "bias") if model.use_bias_in_mlp else ("weight",):
            rules.append(Rule(f"{ours}{name}.{kind}", (f"{theirs}{their_name}.{kind}",), transform))
    return rules


def _fused(model: ModelConfig) -> Transform:
    if new_architecture(model):
        return PerGroup(model.num_attention_heads, model.num_kv_heads)
    return Copy() if model.num_kv_heads == 1 else PerHead(model.num_attention_heads)


def config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    new = new_architecture(model)
    return {
        "model_type": "falcon",
        **common_fields(model, vocab_size, ids),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_kv_heads": model.num_kv_heads,
        "ffn_hidden_size": model.ffn_width,
        "activation": plain_name(model),
        "layer_norm_epsilon": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "alibi": False,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": (1 if model.gpt_j_tied else 2) if new else None,
        "multi_query": not new and model.num_kv_heads == 1,
        "parallel_attn": model.gpt_j_residual,
        "bias": model.use_bias_in_mlp,
        "max_position_embeddings": model.max_position_embeddings,
        **rope_fields(model),
    }


def unsupported(model: ModelConfig) -> list[str]:
    reasons = [*common_refusals(model), *pre_norm_refusals(model), *rotary_refusals(model)]
    reasons += [*output_bias_refusals(model), *width_refusals(model)]
    if model.norm != "layernorm":
        reasons.append(f"norm: {model.norm} (it has layernorm only)")
    reasons += plain_refusals(model)
    if model.rotary_pct != 1.0:
        reasons.append(f"rotary_pct: {model.rotary_pct} (it rotates whole heads)")
    if model.use_bias_in_attn_linear != model.use_bias_in_mlp:
        reasons.append("use_bias_in_attn_linear unlike use_bias_in_mlp (it has biases everywhere or nowhere)")
    if not model.gpt_j_residual and 1 < model.num_kv_heads < model.num_attention_heads:
        reasons.append(f"num_kv_heads: {model.num_kv_heads} (its sequential blocks have one, or one per head)")
    return [*reasons, *no_window_refusals(model)]


def falcon_keys(fields: Fields) -> dict[str, Any]:
    """`FalconConfig`."""
    fields.only("alibi", False)
    fields.only("apply_residual_connection_post_layernorm", False)
    hidden, heads = fields.take("hidden_size", 4544), fields.take("num_attention_heads", 71)
    new, parallel = fields.take("new_decoder_architecture", False), fields.take("parallel_attn", True)
    if new and not parallel:
        raise UserError(f"{fields.where}: parallel_attn: false cannot be expressed with new_decoder_architecture")
    kv, one = fields.take("num_kv_heads", heads), fields.take("multi_query", True)
    norms = fields.take("num_ln_in_parallel_attn", 2 if new else 1)
    if not new and parallel and norms != 1:
        raise UserError(f"{fields.where}: num_ln_in_parallel_attn: {norms} needs new_decoder_architecture")
    activation, tanh = fields.choose("activation", READ_PLAIN, "gelu")
    bias = fields.take("bias", False)
    return {
        "num_layers": fields.take("num_hidden_layers", 32),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_kv_heads": kv if new else 1 if one else heads,
        "intermediate_size": fields.take("ffn_hidden_size", 4 * hidden),
        "max_position_embeddings": fields.take("max_position_embeddings", 2048),
        "norm": "layernorm",
        "layernorm_epsilon": float(fields.take("layer_norm_epsilon", 1e-5)),
        "activation": activation,
        "bias_gelu_fusion": tanh,
        "gpt_j_residual": parallel,
        "gpt_j_tied": parallel and norms == 1,
        "use_bias_in_attn_linear": bias,
        "use_bias_in_mlp": bias,
        "no_weight_tying": not fields.take("tie_word_embeddings", True),
        "pos_emb": "rotary",
        **fields.rotary("rope_theta"),
        "attention_dropout": float(fields.take("attention_dropout", 0.0)),
        "hidden_dropout": float(fields.take("hidden_dropout", 0.0)),
        "init_method_std": float(fields.take("initializer_range", 0.02)),
    }


FAMILIES.register("falcon")(Family("FalconForCausalLM", table, config, unsupported, {"falcon": falcon_keys}))
