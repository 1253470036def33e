"""What several families cannot express, one phrase each."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from megatron.neox_arguments.block_sizes import ATTENTION

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

# Keys that few architectures have, and the value at which they do nothing.
_RARE: dict[str, Any] = {
    "scale_embedding": False,
    "use_bias_in_head": False,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rotary_emb_base_local": None,
    "embedding_dropout": None,
    "value_embedding_interval": 0,
}


def common_refusals(model: ModelConfig, expressed: Collection[str] = ()) -> list[str]:
    """What no family of this package expresses, and rare keys that are not among those `expressed` by this one."""
    same = {"query_pre_attn_scalar": model.head_dim, "embedding_dropout": model.hidden_dropout}
    reasons = [
        f"{key}: {getattr(model, key)} (it has no such thing)"
        for key, nothing in _RARE.items()
        if key not in expressed and getattr(model, key) not in (nothing, same.get(key))
    ]
    if model.use_qk_layernorm and not model.use_separate_qk_norms:
        reasons.append("use_qk_layernorm (one norm for queries and keys)")
    epsilons = {"layernorm": model.layernorm_epsilon, "rmsnorm": model.rms_norm_epsilon}
    if model.mlp_norm_epsilon not in (None, epsilons.get(model.norm)):
        reasons.append(
            f"mlp_norm_epsilon: {model.mlp_norm_epsilon:g} beside {epsilons.get(model.norm)} in the other norms "
            "(it has one epsilon)"
        )
    if model.use_mup:
        reasons.append("use_mup (its multipliers have no place)")
    kinds = {"dense", "none"} | ({"moe"} if "moe_num_experts" in expressed else set())
    if other := sorted(set(model.layer_mlps or ()) - kinds):
        reasons.append(f"feed-forwards of kind {' and '.join(other)}")
    if any(kind not in ATTENTION for kind in model.attention_config or ()):
        reasons.append("attention_config with other kinds than attention")
    return reasons


def pre_norm_refusals(model: ModelConfig) -> list[str]:
    """For families with norms before attention and feed-forward, and none on queries and keys."""
    reasons = []
    if model.norm_placement != "pre":
        reasons.append(f"norm_placement: {model.norm_placement}")
    if model.use_separate_qk_norms:
        reasons.append("use_separate_qk_norms (it has no norms on queries and keys)")
    return reasons


def rotary_refusals(model: ModelConfig) -> list[str]:
    """For families with rotary positions only; all of them may be scaled."""
    return [] if model.pos_emb == "rotary" else [f"pos_emb: {model.pos_emb} (it has rotary positions only)"]


def output_bias_refusals(model: ModelConfig) -> list[str]:
    """For families in which the four attention projections have biases together or not at all."""
    if model.use_bias_in_attn_linear and not model.use_bias_in_attn_output:
        return ["use_bias_in_attn_output: false (its output projection has a bias when the others have)"]
    return []


def width_refusals(model: ModelConfig) -> list[str]:
    """For families whose heads together are as wide as the model."""
    if model.num_attention_heads * model.head_dim != model.hidden_size:
        return [f"head_dim: {model.head_dim} (its heads are hidden_size / num_attention_heads wide)"]
    return []


def no_window_refusals(model: ModelConfig, hint: str = "") -> list[str]:
    """For families in which every layer sees the whole text. `hint`: what else to do, for the message."""
    if any(window is not None for window in model.layer_windows or ()):
        return [f"sliding_window_width (it has full attention only{hint})"]
    return []


def same_window_refusals(model: ModelConfig) -> list[str]:
    """For families in which all layers have the same window, or none."""
    uneven = len(set(model.layer_windows or ())) > 1
    return ["attention_config with a window in some layers only"] if uneven else []
