"""GPT-NeoX and Pythia ↔ `GPTNeoXForCausalLM`.

Their attention keeps fused QKV head by head, so grouped queries cannot be expressed. They always have biases in the MLP
and affine norms; a model without gets zeros and ones. A norm shared by both branches (gpt_j_tied) is written twice.
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
from megatron.convert.parts.transforms import Duplicate, PerHead

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def table(model: ModelConfig) -> list[Rule | Constant]:
    rules: list[Rule | Constant] = [Rule(WORD_EMBEDDINGS, ("gpt_neox.embed_in.weight",))]
    for block in range(model.num_layers):
        rules += _block(model, block)
    rules += _norm(model, f"{model.num_layers + 3}.norm", ("gpt_neox.final_layer_norm",))
    if model.no_weight_tying:
        head = f"{model.num_layers + 4}.final_linear.weight"
        # embed_out in files of every version of transformers; its newer models call the head lm_head.
        rules.append(Rule(head, ("embed_out.weight",), also=(Rule(head, ("lm_head.weight",)),)))
    return rules


def _block(model: ModelConfig, block: int) -> list[Rule | Constant]:
    ours, theirs = f"{block + 2}.", f"gpt_neox.layers.{block}."
    norms = (f"{theirs}input_layernorm", f"{theirs}post_attention_layernorm")
    if model.gpt_j_tied:
        rules = _norm(model, f"{ours}input_layernorm", norms)
    else:
        rules = _norm(model, f"{ours}input_layernorm", norms[:1])
        rules += _norm(model, f"{ours}post_attention_layernorm", norms[1:])
    kinds = ("weight", "bias") if model.use_bias_in_attn_linear else ("weight",)
    for kind in kinds:
        fused = f"attention.query_key_value.{kind}"
        rules.append(Rule(ours + fused, (theirs + fused,), PerHead(model.num_attention_heads)))
        rules.append(Rule(f"{ours}attention.dense.{kind}", (f"{theirs}attention.dense.{kind}",)))
    for name, their_name, rows in (
        ("mlp.linear1", "mlp.dense_h_to_4h", model.ffn_width),
        ("mlp.linear2", "mlp.dense_4h_to_h", model.hidden_size),
    ):
        rules.append(Rule(f"{ours}{name}.weight", (f"{theirs}{their_name}.weight",)))
        if model.use_bias_in_mlp:
            rules.append(Rule(f"{ours}{name}.bias", (f"{theirs}{their_name}.bias",)))
        else:
            rules.append(Constant(f"{theirs}{their_name}.bias", (rows,), 0.0))
    return rules


def _norm(model: ModelConfig, ours: str, theirs: tuple[str, ...]) -> list[Rule | Constant]:
    if model.norm == "layernorm":
        copies = Duplicate(len(theirs))
        return [Rule(f"{ours}.{kind}", tuple(f"{t}.{kind}" for t in theirs), copies) for kind in ("weight", "bias")]
    shape = (model.hidden_size,)
    return [Constant(f"{t}.{kind}", shape, value) for t in theirs for kind, value in (("weight", 1.0), ("bias", 0.0))]


def config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    rope = rope_fields(model, fraction=True)
    return {
        "model_type": "gpt_neox",
        **common_fields(model, vocab_size, ids),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_width,
        "hidden_act": plain_name(model),
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.init_method_std,
        "layer_norm_eps": model.layernorm_epsilon,
        "use_parallel_residual": model.gpt_j_residual,
        "attention_bias": model.use_bias_in_attn_linear,
        "rope_parameters": rope["rope_parameters"],
        "rotary_pct": model.rotary_pct,  # these for transformers 4
        "rotary_emb_base": model.rotary_emb_base,
        **({"rope_scaling": rope["rope_scaling"]} if model.rope_scaling else {}),
    }


def unsupported(model: ModelConfig) -> list[str]:
    reasons = [*common_refusals(model), *pre_norm_refusals(model), *rotary_refusals(model)]
    reasons += [*output_bias_refusals(model), *width_refusals(model)]
    if model.norm not in ("layernorm", "non_parametric_layernorm"):
        reasons.append(f"norm: {model.norm} (it has layernorm only)")
    reasons += plain_refusals(model)
    if model.num_kv_heads != model.num_attention_heads:
        reasons.append(f"num_kv_heads: {model.num_kv_heads} (it has no grouped-query attention)")
    return [*reasons, *no_window_refusals(model)]


def neox_keys(fields: Fields) -> dict[str, Any]:
    """`GPTNeoXConfig`."""
    activation, tanh = fields.choose("hidden_act", READ_PLAIN, "gelu")
    return {
        "num_layers": fields.take("num_hidden_layers"),
        "hidden_size": fields.take("hidden_size"),
        "num_attention_heads": fields.take("num_attention_heads"),
        "intermediate_size": fields.take("intermediate_size", 24576),
        "max_position_embeddings": fields.take("max_position_embeddings", 2048),
        "norm": "layernorm",
        "layernorm_epsilon": float(fields.take("layer_norm_eps", 1e-5)),
        "activation": activation,
        "bias_gelu_fusion": tanh,
        "gpt_j_residual": fields.take("use_parallel_residual", True),
        "use_bias_in_attn_linear": fields.take("attention_bias", True),
        "use_bias_in_mlp": True,
        "no_weight_tying": not fields.take("tie_word_embeddings", False),
        "pos_emb": "rotary",
        **fields.rotary("rotary_emb_base", "rotary_pct", 0.25),
        "attention_dropout": float(fields.take("attention_dropout", 0.0)),
        "hidden_dropout": float(fields.take("hidden_dropout", 0.0)),
        "init_method_std": float(fields.take("initializer_range", 0.02)),
    }


FAMILIES.register("neox")(Family("GPTNeoXForCausalLM", table, config, unsupported, {"gpt_neox": neox_keys}))
