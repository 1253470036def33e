"""GPT-2 ↔ `GPT2LMHeadModel`: learned positions, LayerNorm, matrices stored as [in, out], biases everywhere.

Its fused QKV has our order [Q | K | V]. Models without biases get zeros.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.activations import READ_PLAIN, plain_name, plain_refusals
from megatron.convert.parts.family import WORD_EMBEDDINGS, Constant, Family, Rule, TokenIds, common_fields
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.refusals import common_refusals, no_window_refusals, pre_norm_refusals, width_refusals
from megatron.convert.parts.transforms import Transpose

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def table(model: ModelConfig) -> list[Rule | Constant]:
    """The files of the first models leave out `transformer.`, as those of the bare network do."""
    return [_with_bare_names(rule) if isinstance(rule, Rule) else rule for rule in _table(model)]


def _with_bare_names(rule: Rule) -> Rule:
    bare = tuple(name.removeprefix("transformer.") for name in rule.theirs)
    return replace(rule, also=(replace(rule, theirs=bare),))


def _table(model: ModelConfig) -> list[Rule | Constant]:
    rules: list[Rule | Constant] = [
        Rule(WORD_EMBEDDINGS, ("transformer.wte.weight",)),
        Rule("0.position_embeddings.weight", ("transformer.wpe.weight",)),
    ]
    for block in range(model.num_layers):
        rules += _block(model, block)
    for kind in ("weight", "bias"):
        rules.append(Rule(f"{model.num_layers + 3}.norm.{kind}", (f"transformer.ln_f.{kind}",)))
    if model.no_weight_tying:
        rules.append(Rule(f"{model.num_layers + 4}.final_linear.weight", ("lm_head.weight",)))
    return rules


def _block(model: ModelConfig, block: int) -> list[Rule | Constant]:
    ours, theirs = f"{block + 2}.", f"transformer.h.{block}."
    rules: list[Rule | Constant] = []
    for name, their_name in (("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2")):
        rules += [Rule(f"{ours}{name}.{kind}", (f"{theirs}{their_name}.{kind}",)) for kind in ("weight", "bias")]
    h, qkv_bias = model.hidden_size, model.use_bias_in_attn_linear
    for name, their_name, rows, bias in (
        ("attention.query_key_value", "attn.c_attn", 3 * h, qkv_bias),
        ("attention.dense", "attn.c_proj", h, qkv_bias and model.use_bias_in_attn_output),
        ("mlp.linear1", "mlp.c_fc", model.ffn_width, model.use_bias_in_mlp),
        ("mlp.linear2", "mlp.c_proj", h, model.use_bias_in_mlp),
    ):
        rules.append(Rule(f"{ours}{name}.weight", (f"{theirs}{their_name}.weight",), Transpose()))
        their_bias = f"{theirs}{their_name}.bias"
        rules.append(Rule(f"{ours}{name}.bias", (their_bias,)) if bias else Constant(their_bias, (rows,), 0.0))
    return rules


def config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        **common_fields(model, vocab_size, ids),
        "n_positions": model.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_width,
        "activation_function": plain_name(model, "gelu_new"),
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
    }


def unsupported(model: ModelConfig) -> list[str]:
    reasons = [*common_refusals(model), *pre_norm_refusals(model), *width_refusals(model)]
    if model.pos_emb != "learned":
        reasons.append(f"pos_emb: {model.pos_emb} (it has learned positions only)")
    if model.opt_pos_emb_offset:
        reasons.append(f"opt_pos_emb_offset: {model.opt_pos_emb_offset}")
    if model.norm != "layernorm":
        reasons.append(f"norm: {model.norm} (it has layernorm only)")
    reasons += plain_refusals(model)
    if model.gpt_j_residual:
        reasons.append("gpt_j_residual (its residuals are sequential)")
    if model.num_kv_heads != model.num_attention_heads:
        reasons.append(f"num_kv_heads: {model.num_kv_heads} (it has no grouped-query attention)")
    return [*reasons, *no_window_refusals(model)]


def gpt2_keys(fields: Fields) -> dict[str, Any]:
    """`GPT2Config`."""
    for name, value in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("reorder_and_upcast_attn", False),
    ):
        fields.only(name, value)
    hidden, length = fields.take("n_embd", 768), fields.take("n_positions", 1024)
    fields.only("n_ctx", length)
    dropout = fields.take("resid_pdrop", 0.1)
    fields.only("embd_pdrop", dropout)
    activation, tanh = fields.choose("activation_function", READ_PLAIN, "gelu_new")
    return {
        "num_layers": fields.take("n_layer", 12),
        "hidden_size": hidden,
        "num_attention_heads": fields.take("n_head", 12),
        "intermediate_size": fields.take("n_inner", 4 * hidden),
        "max_position_embeddings": length,
        "norm": "layernorm",
        "layernorm_epsilon": float(fields.take("layer_norm_epsilon", 1e-5)),
        "activation": activation,
        "bias_gelu_fusion": tanh,
        "use_bias_in_attn_linear": True,
        "use_bias_in_mlp": True,
        "no_weight_tying": not fields.take("tie_word_embeddings", True),
        "pos_emb": "learned",
        "attention_dropout": float(fields.take("attn_pdrop", 0.1)),
        "hidden_dropout": float(dropout),
        "init_method_std": float(fields.take("initializer_range", 0.02)),
    }


FAMILIES.register("gpt2")(Family("GPT2LMHeadModel", table, config, unsupported, {"gpt2": gpt2_keys}))
