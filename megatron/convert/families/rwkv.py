"""RWKV-4 ↔ `RwkvForCausalLM`.

Their tensors have our shapes. For inference transformers halves the residual stream and what is added to it every
`rescale_every` blocks, so that fp16 does not overflow, and its norms take that out again (but for their epsilon). Files
hold the weights unscaled, and training knows no such thing; what is written is transformers' default.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.family import WORD_EMBEDDINGS, Constant, Family, Rule, TokenIds, common_fields
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.refusals import common_refusals
from megatron.errors import UserError

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


EPSILON = 1e-5  # of transformers' last norm, whatever that of the others is
_HALVES = {
    "time_mixing": (
        "attention",
        ("time_decay", "time_first", "time_mix_key", "time_mix_value", "time_mix_receptance"),
        ("key", "value", "receptance", "output"),
    ),
    "channel_mixing": ("feed_forward", ("time_mix_key", "time_mix_receptance"), ("key", "receptance", "value")),
}
_NORMS = {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}


def rwkv4_table(model: ModelConfig) -> list[Rule | Constant]:
    """Every tensor of a model."""
    rules: list[Rule | Constant] = [Rule(WORD_EMBEDDINGS, ("rwkv.embeddings.weight",))]
    rules += _norm("2.pre_layernorm", "rwkv.blocks.0.pre_ln")
    for block in range(model.num_layers):
        ours, theirs = f"{block + 2}.", f"rwkv.blocks.{block}."
        for name, their_name in _NORMS.items():
            rules += _norm(f"{ours}{name}", f"{theirs}{their_name}")
        for half, (their_half, vectors, matrices) in _HALVES.items():
            for name in (*vectors, *(f"{matrix}.weight" for matrix in matrices)):
                rules.append(Rule(f"{ours}{half}.{name}", (f"{theirs}{their_half}.{name}",)))
    rules += _norm(f"{model.num_layers + 3}.norm", "rwkv.ln_out")
    if model.no_weight_tying:
        rules.append(Rule(f"{model.num_layers + 4}.final_linear.weight", ("head.weight",)))
    return rules


def _norm(ours: str, theirs: str) -> list[Rule]:
    return [Rule(f"{ours}.{name}", (f"{theirs}.{name}",)) for name in ("weight", "bias")]


def rwkv4_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    """`RwkvConfig`."""
    return {
        "model_type": "rwkv",
        **common_fields(model, vocab_size, ids),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "attention_hidden_size": model.dim_att,
        "intermediate_size": model.ffn_dim,
        "context_length": model.max_position_embeddings,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "rescale_every": 6,
    }


def rwkv4_refusals(model: ModelConfig) -> list[str]:
    """What `RwkvForCausalLM` cannot express."""
    reasons = common_refusals(replace(model, attention_config=None))
    if set(model.attention_config or ()) != {"rwkv4"}:
        reasons.append("attention_config with other kinds than rwkv4")
    if model.pos_emb not in ("none", "rotary", "alibi"):  # the last two act in attention only
        reasons.append(f"pos_emb: {model.pos_emb} (it has no positions)")
    if model.norm != "layernorm":
        reasons.append(f"norm: {model.norm} (it has layernorm only)")
    if model.layernorm_epsilon != EPSILON:
        reasons.append(f"layernorm_epsilon: {model.layernorm_epsilon} (its last norm has {EPSILON})")
    if model.dim_att != model.hidden_size:
        reasons.append(f"dim_att: {model.dim_att} (its state has hidden_size channels)")
    return reasons


def rwkv4_keys(fields: Fields) -> dict[str, Any]:
    """`RwkvConfig`."""
    hidden = fields.take("hidden_size", 4096)
    epsilon = float(fields.take("layer_norm_epsilon", 1e-5))
    if epsilon != EPSILON:
        known = f"{EPSILON}, which its last norm has in any case"
        raise UserError(f"{fields.where}: layer_norm_epsilon: {epsilon} cannot be expressed (known: {known})")
    channels = fields.take("attention_hidden_size", hidden)
    if channels != hidden:
        raise UserError(
            f"{fields.where}: attention_hidden_size: {channels} cannot be expressed (transformers keeps a state of"
            f" hidden_size, here {hidden})"
        )
    fields.take("rescale_every", None)  # against overflow of fp16; the same function
    return {
        "num_layers": fields.take("num_hidden_layers", 32),
        "hidden_size": hidden,
        "max_position_embeddings": fields.take("context_length", 1024),
        "attention_config": [[["rwkv4"], "all"]],
        "ffn_dim": fields.take("intermediate_size", 4 * hidden),
        "pos_emb": "none",
        "norm": "layernorm",
        "layernorm_epsilon": epsilon,
        "no_weight_tying": not fields.take("tie_word_embeddings", False),
        "init_method": "small_init",
        "output_layer_init_method": "wang_init",
    }


FAMILIES.register("rwkv4")(Family("RwkvForCausalLM", rwkv4_table, rwkv4_config, rwkv4_refusals, {"rwkv": rwkv4_keys}))
