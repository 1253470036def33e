"""LLaMA and Mistral ↔ `LlamaForCausalLM`, `MistralForCausalLM`: one table of tensors.

Mistral adds a sliding window and has no biases. Their window counts the query itself, ours the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from megatron.convert.parts.activations import GATED, gated_refusals
from megatron.convert.parts.family import (
    FAMILIES,
    WORD_EMBEDDINGS,
    Constant,
    Family,
    Rule,
    TokenIds,
    common_refusals,
    output_bias_refusals,
    pre_norm_refusals,
    rotary_refusals,
)
from megatron.convert.parts.positions import rope_fields
from megatron.convert.parts.transforms import Split

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

# The norms of a block by norm_placement; theirs have the same names.
_NORMS = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "olmo3": ("post_feedforward_layernorm", "post_attention_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


def dense_rules(model: ModelConfig, block: int) -> list[Rule]:
    """The feed-forward of a block."""
    ours, theirs, rules = f"{block + 2}.mlp.", f"model.layers.{block}.mlp.", []
    for kind in ("weight", "bias") if model.use_bias_in_mlp else ("weight",):
        halves = tuple(f"{theirs}{part}_proj.{kind}" for part in ("up", "gate"))
        rules.append(Rule(f"{ours}linear1.{kind}", halves, Split((model.ffn_width, model.ffn_width))))
        rules.append(Rule(f"{ours}linear2.{kind}", (f"{theirs}down_proj.{kind}",)))
    return rules


def table(
    model: ModelConfig, feed_forward: Callable[[ModelConfig, int], list[Rule]] = dense_rules
) -> list[Rule | Constant]:
    """Of LLaMA and of the families that keep its names (qwen.py, olmo.py, gemma.py), some with other feed-forwards
    (moe_families.py)."""
    rules: list[Rule | Constant] = [Rule(WORD_EMBEDDINGS, ("model.embed_tokens.weight",))]
    for block in range(model.num_layers):
        rules += _attention_rules(model, block)
        rules += feed_forward(model, block)
    rules.append(Rule(f"{model.num_layers + 3}.norm.scale", ("model.norm.weight",)))
    if model.no_weight_tying:
        rules.append(Rule(f"{model.num_layers + 4}.final_linear.weight", ("lm_head.weight",)))
    return rules


def _attention_rules(model: ModelConfig, block: int) -> list[Rule]:
    """Attention and norms of a block."""
    ours, theirs = f"{block + 2}.", f"model.layers.{block}."
    q, kv = model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
    rules = [Rule(f"{ours}{name}.scale", (f"{theirs}{name}.weight",)) for name in _NORMS[model.norm_placement]]
    for kind in ("weight", "bias") if model.use_bias_in_attn_linear else ("weight",):
        projections = tuple(f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv")
        rules.append(Rule(f"{ours}attention.query_key_value.{kind}", projections, Split((q, kv, kv))))
        if kind == "weight" or model.use_bias_in_attn_output:
            rules.append(Rule(f"{ours}attention.dense.{kind}", (f"{theirs}self_attn.o_proj.{kind}",)))
    if model.use_separate_qk_norms:
        rules += [Rule(f"{ours}attention.{x}_norm.scale", (f"{theirs}self_attn.{x}_norm.weight",)) for x in "qk"]
    return rules


def llama_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    return {
        "model_type": "llama",
        **common_config(model, vocab_size, ids),
        "attention_bias": model.use_bias_in_attn_linear,
        "mlp_bias": model.use_bias_in_mlp,
    }


def mistral_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    window = model.layer_windows[0]
    return {
        "model_type": "mistral",
        **common_config(model, vocab_size, ids),
        "sliding_window": None if window is None else window + 1,
    }


def common_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": GATED[model.activation],
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.rms_norm_epsilon,
        "use_cache": True,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "pad_token_id": ids.pad,
        "tie_word_embeddings": not model.no_weight_tying,
        "attention_dropout": model.attention_dropout,
        **rope_fields(model),
    }


def decoder_refusals(
    model: ModelConfig, *, rotary_pct: bool = False, hidden_dropout: bool = False, expressed: Collection[str] = ()
) -> list[str]:
    """What LLaMA and its relatives do not express: other norms, plain activations, parallel residuals.

    `rotary_pct`, `hidden_dropout`: the relative has that key. `expressed`: as in `common_refusals`.
    """
    reasons = common_refusals(model, expressed)
    if model.norm != "rmsnorm":
        reasons.append(f"norm: {model.norm} (it has rmsnorm only)")
    reasons += gated_refusals(model)
    if model.gpt_j_residual:
        reasons.append("gpt_j_residual (its residuals are sequential)")
    if model.rotary_pct != 1.0 and not rotary_pct:
        reasons.append(f"rotary_pct: {model.rotary_pct} (it rotates whole heads)")
    reasons += rotary_refusals(model)
    if model.hidden_dropout and not hidden_dropout:
        reasons.append(f"hidden_dropout: {model.hidden_dropout} (it has none)")
    return reasons


def llama_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*decoder_refusals(model), *pre_norm_refusals(model), *output_bias_refusals(model)]
    if any(window is not None for window in model.layer_windows or ()):
        reasons.append("sliding_window_width (it has full attention only; try --architecture mistral)")
    return reasons


def mistral_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*decoder_refusals(model), *pre_norm_refusals(model)]
    if len(set(model.layer_windows or ())) > 1:
        reasons.append("attention_config with a window in some layers only")
    if model.use_bias_in_attn_linear or model.use_bias_in_mlp:
        reasons.append("use_bias_in_attn_linear or use_bias_in_mlp (it has no biases)")
    return reasons


FAMILIES.register("llama")(Family("LlamaForCausalLM", table, llama_config, llama_unsupported))
FAMILIES.register("mistral")(Family("MistralForCausalLM", table, mistral_config, mistral_unsupported))
