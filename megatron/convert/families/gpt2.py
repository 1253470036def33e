"""GPT-2 ↔ `GPT2LMHeadModel`: learned positions, LayerNorm, matrices stored as [in, out], biases everywhere.

Its fused QKV has our order [Q | K | V]. Models without biases get zeros.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.convert.parts.activations import plain_name, plain_refusals
from megatron.convert.parts.family import (
    FAMILIES,
    WORD_EMBEDDINGS,
    Constant,
    Family,
    Rule,
    TokenIds,
    common_refusals,
    pre_norm_refusals,
    width_refusals,
)
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
        "vocab_size": vocab_size,
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
        "use_cache": True,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "pad_token_id": ids.pad,
        "tie_word_embeddings": not model.no_weight_tying,
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
    if any(window is not None for window in model.layer_windows or ()):
        reasons.append("sliding_window_width (it has full attention only)")
    return reasons


FAMILIES.register("gpt2")(Family("GPT2LMHeadModel", table, config, unsupported))
