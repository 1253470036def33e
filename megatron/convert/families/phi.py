"""Phi-1, Phi-1.5 and Phi-2 ↔ `PhiForCausalLM` (Phi-3: phi3.py): parallel blocks with one norm, biases everywhere.

The output head has a bias too. Rotary positions turn a part of each head. Norms on queries and keys (`qk_layernorm`,
which no published model has) are not expressed.
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
    pre_norm_refusals,
    rotary_refusals,
    width_refusals,
)
from megatron.convert.parts.transforms import Split

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def table(model: ModelConfig) -> list[Rule | Constant]:
    q, kv = model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
    rules: list[Rule | Constant] = [Rule(WORD_EMBEDDINGS, ("model.embed_tokens.weight",))]
    for kind in ("weight", "bias"):
        for block in range(model.num_layers):
            ours, theirs = f"{block + 2}.", f"model.layers.{block}."
            projections = tuple(f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv")
            rules.append(Rule(f"{ours}attention.query_key_value.{kind}", projections, Split((q, kv, kv))))
            rules += [
                Rule(f"{ours}{name}.{kind}", (f"{theirs}{their_name}.{kind}",))
                for name, their_name in (
                    ("input_layernorm", "input_layernorm"),
                    ("attention.dense", "self_attn.dense"),
                    ("mlp.linear1", "mlp.fc1"),
                    ("mlp.linear2", "mlp.fc2"),
                )
            ]
        rules.append(Rule(f"{model.num_layers + 3}.norm.{kind}", (f"model.final_layernorm.{kind}",)))
        rules.append(Rule(f"{model.num_layers + 4}.final_linear.{kind}", (f"lm_head.{kind}",)))
    return rules


def config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    return {
        "model_type": "phi",
        **common_fields(model, vocab_size, ids),
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout if model.embedding_dropout is None else model.embedding_dropout,
        "attention_dropout": model.attention_dropout,
        "hidden_act": plain_name(model, "gelu_new"),
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.init_method_std,
        "layer_norm_eps": model.layernorm_epsilon,
        "qk_layernorm": False,
        **rope_fields(model, fraction=True),
    }


def unsupported(model: ModelConfig) -> list[str]:
    reasons = common_refusals(model, expressed=("use_bias_in_head", "embedding_dropout"))
    reasons += [*pre_norm_refusals(model), *rotary_refusals(model), *width_refusals(model)]
    if model.norm != "layernorm":
        reasons.append(f"norm: {model.norm} (it has layernorm only)")
    reasons += plain_refusals(model)
    if not (model.gpt_j_residual and model.gpt_j_tied):
        reasons.append("no gpt_j_residual with gpt_j_tied (its attention and feed-forward are parallel, with one norm)")
    biases = ("use_bias_in_attn_linear", "use_bias_in_attn_output", "use_bias_in_mlp", "use_bias_in_head")
    reasons += [f"{name}: false (it has biases everywhere)" for name in biases if not getattr(model, name)]
    if not model.no_weight_tying:
        reasons.append("no_weight_tying: false (its head has a matrix of its own)")
    return [*reasons, *no_window_refusals(model)]


def phi_keys(fields: Fields) -> dict[str, Any]:
    """`PhiConfig`: Phi-1, 1.5 and 2."""
    fields.only("qk_layernorm", False)
    fields.only("tie_word_embeddings", False)
    activation, tanh = fields.choose("hidden_act", READ_PLAIN, "gelu_new")
    heads, residual = fields.take("num_attention_heads", 32), float(fields.take("resid_pdrop", 0.0))
    embedded = float(fields.take("embd_pdrop", 0.0))
    return {
        "num_layers": fields.take("num_hidden_layers", 24),
        "hidden_size": fields.take("hidden_size", 2048),
        "num_attention_heads": heads,
        "num_kv_heads": fields.take("num_key_value_heads", heads),
        "intermediate_size": fields.take("intermediate_size", 8192),
        "max_position_embeddings": fields.take("max_position_embeddings", 2048),
        "norm": "layernorm",
        "layernorm_epsilon": float(fields.take("layer_norm_eps", 1e-5)),
        "activation": activation,
        "bias_gelu_fusion": tanh,
        "gpt_j_residual": True,
        "gpt_j_tied": True,
        "use_bias_in_attn_linear": True,
        "use_bias_in_mlp": True,
        "use_bias_in_head": True,
        "no_weight_tying": True,
        "pos_emb": "rotary",
        **fields.rotary("rope_theta", fraction_default=0.5),
        "attention_dropout": float(fields.take("attention_dropout", 0.0)),
        "hidden_dropout": residual,
        **({"embedding_dropout": embedded} if embedded != residual else {}),
        "init_method_std": float(fields.take("initializer_range", 0.02)),
    }


FAMILIES.register("phi")(Family("PhiForCausalLM", table, config, unsupported, {"phi": phi_keys}))
