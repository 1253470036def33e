"""Mamba ↔ `MambaForCausalLM` and Mamba-2 ↔ `Mamba2ForCausalLM`.

Their tensors have our names and row orders (in_proj [x | z], and [z | x | B | C | dt]). Both keep the residual stream
of a half-precision model in fp32 where we keep it in the model's type; in fp32 they compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.family import WORD_EMBEDDINGS, Constant, Family, Rule, TokenIds, common_fields
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.refusals import common_refusals
from megatron.errors import UserError

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


UNLIMITED = 1 << 20  # `max_position_embeddings` of models without positions
_INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it


def _table(model: ModelConfig, kind: str) -> list[Rule | Constant]:
    rules: list[Rule | Constant] = [Rule(WORD_EMBEDDINGS, ("backbone.embeddings.weight",))]
    names = _MIXERS[kind](model)
    for block in range(model.num_layers):
        ours, theirs = f"{block + 2}.", f"backbone.layers.{block}."
        rules.append(Rule(f"{ours}norm.scale", (f"{theirs}norm.weight",)))
        for name in names:
            their_name = name.replace("norm.scale", "norm.weight")
            rules.append(Rule(f"{ours}mixer.{name}", (f"{theirs}mixer.{their_name}",)))
    rules.append(Rule(f"{model.num_layers + 3}.norm.scale", ("backbone.norm_f.weight",)))
    if model.no_weight_tying:
        rules.append(Rule(f"{model.num_layers + 4}.final_linear.weight", ("lm_head.weight",)))
    return rules


def _common_names(model: ModelConfig) -> list[str]:
    names = ["in_proj.weight", "conv1d.weight", "A_log", "D", "out_proj.weight"]
    if model.mamba_use_bias_in_conv:
        names.append("conv1d.bias")
    return [*names, "in_proj.bias", "out_proj.bias"] if model.mamba_use_bias_in_linears else names


def _mamba_names(model: ModelConfig) -> list[str]:
    return [*_common_names(model), "x_proj.weight", "dt_proj.weight", "dt_proj.bias"]


def _mamba2_names(model: ModelConfig) -> list[str]:
    return [*_common_names(model), "dt_bias", "norm.scale"]


_MIXERS: dict[str, Callable[[ModelConfig], list[str]]] = {"mamba": _mamba_names, "mamba2": _mamba2_names}


def _common_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    return {
        **common_fields(model, vocab_size, ids),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "state_size": model.mamba_d_state,
        "expand": model.mamba_expand,
        "conv_kernel": model.mamba_d_conv,
        "use_bias": model.mamba_use_bias_in_linears,
        "use_conv_bias": model.mamba_use_bias_in_conv,
        "hidden_act": "silu",
        "layer_norm_epsilon": model.rms_norm_epsilon,
        "initializer_range": 0.1,  # transformers' own; its models were not made with it
        "residual_in_fp32": True,
        "rescale_prenorm_residual": False,
        "time_step_min": model.mamba_dt_min,
        "time_step_max": model.mamba_dt_max,
        "time_step_floor": model.mamba_dt_init_floor,
    }


def mamba_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    own = {"time_step_rank": model.mamba_dt_rank, "time_step_scale": 1.0, "time_step_init_scheme": "random"}
    return {"model_type": "mamba", **_common_config(model, vocab_size, ids), **own}


def mamba2_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    return {
        "model_type": "mamba2",
        **_common_config(model, vocab_size, ids),
        "num_heads": model.mamba_expand * model.hidden_size // model.mamba_head_dim,
        "head_dim": model.mamba_head_dim,
        "n_groups": model.mamba_n_groups,
        "chunk_size": model.mamba_chunk_size,
    }


def _unsupported(model: ModelConfig, kind: str) -> list[str]:
    reasons = common_refusals(replace(model, attention_config=None))
    if set(model.attention_config or ()) != {kind}:
        reasons.append(f"attention_config with other kinds than {kind}")
    if model.pos_emb not in ("none", "rotary", "alibi"):  # the last two act in attention only
        reasons.append(f"pos_emb: {model.pos_emb} (it has no positions)")
    if model.norm != "rmsnorm":
        reasons.append(f"norm: {model.norm} (it has rmsnorm only)")
    if kind == "mamba" and model.mamba_use_bias_in_linears and model.mamba_use_bias_in_x_proj:
        reasons.append("mamba_use_bias_in_x_proj: true (its biases are in in_proj and out_proj)")
    return reasons


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


FAMILIES.register("mamba")(
    Family(
        "MambaForCausalLM",
        partial(_table, kind="mamba"),
        mamba_config,
        partial(_unsupported, kind="mamba"),
        {"mamba": mamba_keys},
    )
)
FAMILIES.register("mamba2")(
    Family(
        "Mamba2ForCausalLM",
        partial(_table, kind="mamba2"),
        mamba2_config,
        partial(_unsupported, kind="mamba2"),
        {"mamba2": mamba2_keys},
    )
)
