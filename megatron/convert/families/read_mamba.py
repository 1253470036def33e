"""Readers of config.json of Mamba and Mamba-2, whose tables are in mamba.py."""

from __future__ import annotations

import math
from typing import Any

from megatron.convert.families.mamba import UNLIMITED
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.read_config import READERS, Reader
from megatron.errors import UserError

_INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it


def mamba_keys(fields: Fields) -> dict[str, Any]:
    """`MambaConfig`."""
    keys = _common_keys(fields, hidden=768, layers=32, state=16, tied=True)
    rank = fields.take("time_step_rank", "auto")
    for name in ("time_step_scale", "time_step_init_scheme", "use_mambapy", "use_associative_scan"):
        fields.take(name, None)  # how it is initialised, and which code runs it
    if rank != "auto" and rank != -(-keys["hidden_size"] // 16):
        keys["mamba_dt_rank"] = int(rank)
    return keys


def mamba2_keys(fields: Fields) -> dict[str, Any]:
    """`Mamba2Config`."""
    keys = _common_keys(fields, hidden=4096, layers=64, state=128, tied=False)
    fields.take("time_step_rank", None)  # of Mamba-1
    low, high = fields.take("time_step_limit", (0.0, math.inf))
    if low != 0.0 or high not in (math.inf, _INFINITY):
        raise UserError(f"{fields.where}: time_step_limit: {[low, high]} cannot be expressed (step sizes are not cut)")
    if fields.take("norm_before_gate", False) or not fields.take("rms_norm", True):
        raise UserError(f"{fields.where}: a mixer without its gated norm, or with the norm first, cannot be expressed")
    heads, width = fields.take("num_heads", 128), fields.take("head_dim", 64)
    inner = keys["hidden_size"] * keys.get("mamba_expand", 2)
    if heads * width != inner:
        raise UserError(f"{fields.where}: num_heads: {heads} of head_dim {width} are not {inner} channels")
    return {
        **keys,
        "mamba_head_dim": width,
        "mamba_n_groups": fields.take("n_groups", 8),
        "mamba_chunk_size": fields.take("chunk_size", 256),
    }


def _common_keys(fields: Fields, *, hidden: int, layers: int, state: int, tied: bool) -> dict[str, Any]:
    hidden, layers = fields.take("hidden_size", hidden), fields.take("num_hidden_layers", layers)
    expand = fields.take("expand", 2)
    for name, value in (
        ("hidden_act", "silu"),
        ("d_model", hidden),
        ("n_layer", layers),
        ("intermediate_size", expand * hidden),
        ("d_inner", expand * hidden),
        ("rms_norm", True),
        ("ssm_cfg", {}),
    ):
        if fields.take(name, value) != value:
            raise UserError(f"{fields.where}: {name}: {fields.take(name)!r} cannot be expressed (known: {value!r})")
    of_kernels = ("residual_in_fp32", "fused_add_norm", "pad_vocab_size_multiple")
    for name in (*of_kernels, "rescale_prenorm_residual", "initializer_range"):  # and of the start of training
        fields.take(name, None)
    kind = str(fields.take("model_type"))
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "max_position_embeddings": UNLIMITED,
        "attention_config": [[[kind], "all"]],
        "pos_emb": "none",
        "norm": "rmsnorm",
        "rms_norm_epsilon": float(fields.take("layer_norm_epsilon", 1e-5)),
        "no_weight_tying": not fields.take("tie_word_embeddings", tied),
        "mamba_d_state": fields.take("state_size", state),
        "mamba_expand": expand,
        "mamba_d_conv": fields.take("conv_kernel", 4),
        "mamba_use_bias_in_linears": fields.take("use_bias", False),
        "mamba_use_bias_in_x_proj": False,
        "mamba_use_bias_in_conv": fields.take("use_conv_bias", True),
        "mamba_dt_min": float(fields.take("time_step_min", 0.001)),
        "mamba_dt_max": float(fields.take("time_step_max", 0.1)),
        "mamba_dt_init_floor": float(fields.take("time_step_floor", 1e-4)),
        "output_layer_init_method": "single_residual_scaled_normal",
    }


READERS.register("mamba")(Reader("mamba", mamba_keys))
READERS.register("mamba2")(Reader("mamba2", mamba2_keys))
