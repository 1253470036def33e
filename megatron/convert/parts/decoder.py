"""What LLaMA and its relatives have in common: names of tensors, fields of config.json both ways, what they lack."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from megatron.convert.parts.activations import GATED, READ_GATED, gated_refusals
from megatron.convert.parts.family import WORD_EMBEDDINGS, Constant, Rule, TokenIds, common_fields
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.positions import rope_fields
from megatron.convert.parts.refusals import common_refusals, rotary_refusals
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


def decoder_table(
    model: ModelConfig, feed_forward: Callable[[ModelConfig, int], list[Rule]] = dense_rules
) -> list[Rule | Constant]:
    """Of LLaMA and the families that keep its names. `feed_forward`: the rules of a block's, dense or experts."""
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


def decoder_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    """The fields of config.json."""
    return {
        **common_fields(model, vocab_size, ids),
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
        "attention_dropout": model.attention_dropout,
        **rope_fields(model),
    }


def decoder_refusals(
    model: ModelConfig, *, rotary_pct: bool = False, hidden_dropout: bool = False, expressed: Collection[str] = ()
) -> list[str]:
    """What they do not express: other norms, plain activations, parallel residuals.

    `rotary_pct`, `hidden_dropout`: the family has that key. `expressed`: as in `common_refusals`.
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


def decoder_keys(fields: Fields, rotary: dict[str, Any] | None = None) -> dict[str, Any]:
    """Our keys. `rotary`: our keys of the positions, where they were read before."""
    hidden, heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    width = fields.take("head_dim", hidden // heads)
    return {
        **({"head_dim": width} if width * heads != hidden else {}),
        "num_layers": fields.take("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_kv_heads": fields.take("num_key_value_heads", heads),
        "intermediate_size": fields.take("intermediate_size"),
        "gated_width_rule": "final",
        "max_position_embeddings": fields.take("max_position_embeddings"),
        "norm": "rmsnorm",
        "rms_norm_epsilon": float(fields.take("rms_norm_eps", 1e-6)),
        "activation": fields.choose("hidden_act", READ_GATED, "silu"),
        "no_weight_tying": not fields.take("tie_word_embeddings", False),
        "pos_emb": "rotary",
        **(rotary or fields.rotary("rope_theta")),
        "attention_dropout": float(fields.take("attention_dropout", 0.0)),
        "hidden_dropout": 0.0,
        "init_method_std": float(fields.take("initializer_range", 0.02)),
    }
