"""Reader of config.json of RWKV-4, whose table is in rwkv.py."""

from __future__ import annotations

from typing import Any

from megatron.convert.families.rwkv import EPSILON
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.read_config import READERS, Reader
from megatron.errors import UserError


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


READERS.register("rwkv")(Reader("rwkv4", rwkv4_keys))
