"""Mamba ↔ `MambaForCausalLM` and Mamba-2 ↔ `Mamba2ForCausalLM`.

Their tensors have our names and row orders (in_proj [x | z], and [z | x | B | C | dt]). Both keep the residual stream
of a half-precision model in fp32 where we keep it in the model's type; in fp32 they compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.convert.parts.family import FAMILIES, WORD_EMBEDDINGS, Constant, Family, Rule, TokenIds, common_refusals

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

UNLIMITED = 1 << 20  # `max_position_embeddings` of models without positions


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
        "vocab_size": vocab_size,
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
        "use_cache": True,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "pad_token_id": ids.pad,
        "tie_word_embeddings": not model.no_weight_tying,
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


FAMILIES.register("mamba")(
    Family(
        "MambaForCausalLM",
        lambda model: _table(model, "mamba"),
        mamba_config,
        lambda model: _unsupported(model, "mamba"),
    )
)
FAMILIES.register("mamba2")(
    Family(
        "Mamba2ForCausalLM",
        lambda model: _table(model, "mamba2"),
        mamba2_config,
        lambda model: _unsupported(model, "mamba2"),
    )
)
