"""From a Hugging Face config.json to our flat keys: one reader per `model_type`, the inverse of `Family.config`.

A reader takes every field it can express from `Fields`; defaults are those of transformers' classes. What is left over
is refused by `Fields.finish`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.convert.parts.activations import READ_GATED, READ_PLAIN
from megatron.convert.parts.fields import Fields
from megatron.errors import UserError, nearest
from megatron.registry import Registry


@dataclass(frozen=True)
class Reader:
    """How models of one `model_type` are read.

    Attributes:
        family: the name in `FAMILIES` whose table of tensors they have.
        keys: our flat keys of the architecture.
    """

    family: str
    keys: Callable[[Fields], dict[str, Any]]


READERS: Registry[Reader] = Registry(
    "model_type", wants="a Reader of megatron.convert.parts.read_config", fits=lambda entry: isinstance(entry, Reader)
)
"""`Reader`s by the `model_type` of a config.json. `keys` takes from its `Fields` every field that changes what is
computed (the rest is refused), and gives keys with which the family's `config` writes the same fields again.
"""


def read_config(values: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """(name of the family, our keys) of a config.json. Raises `UserError` naming what is unknown or not expressible."""
    kind = values.get("model_type")
    if kind not in READERS:
        known = sorted(READERS)
        hint = nearest(str(kind), known)
        raise UserError(f"{where}: model_type: {kind!r} is not known here.{hint} Known: {', '.join(known)}")
    fields = Fields(values, where)
    reader = READERS[kind]
    keys = reader.keys(fields)
    fields.finish()
    return reader.family, keys


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


def llama_keys(fields: Fields) -> dict[str, Any]:
    """`LlamaConfig`."""
    biases = {
        "use_bias_in_attn_linear": fields.take("attention_bias", False),
        "use_bias_in_mlp": fields.take("mlp_bias", False),
    }
    return {**decoder_keys(fields), **biases}


def mistral_keys(fields: Fields) -> dict[str, Any]:
    """`MistralConfig`. Where the window is left out it is 4096."""
    return {**decoder_keys(fields), **no_biases_one_window(fields, 4096)}


def no_biases_one_window(fields: Fields, default: int | None) -> dict[str, Any]:
    """The same window in every layer, `default` where it is left out; null is none.

    Theirs counts the query itself, ours the tokens before it.
    """
    window = fields.take_or_null("sliding_window", default)
    if window is not None and window < 2:
        raise UserError(f"{fields.where}: sliding_window: {window} lets no token see another and cannot be expressed")
    keys = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
    return keys if window is None else {**keys, "sliding_window_width": window - 1}


def decoder_keys(fields: Fields, rotary: dict[str, Any] | None = None) -> dict[str, Any]:
    """What LLaMA and its relatives have in common. `rotary`: our keys of the positions, if they were read already."""
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


READERS.register("gpt_neox")(Reader("neox", neox_keys))
READERS.register("llama")(Reader("llama", llama_keys))
READERS.register("mistral")(Reader("mistral", mistral_keys))
