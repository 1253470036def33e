"""Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE ↔ `MixtralForCausalLM`, `OlmoeForCausalLM`, `Qwen2MoeForCausalLM`,
`Qwen3MoeForCausalLM`: attention of their dense relatives, experts in all or some layers.

Files have three matrices for each expert, transformers' running models all of a layer in two tensors; both are read.
Legend: E experts, F moe_intermediate_size, h hidden.

| family    | weights of a token's experts  | dense layers | beside the experts              | attention               |
|-----------|-------------------------------|--------------|---------------------------------|-------------------------|
| Mixtral   | normalised                    | none         |                                 | Mistral's               |
| OLMoE     | normalised or not             | none         |                                 | norms over all heads    |
| Qwen2-MoE | normalised or not             | some         | a shared expert, times its gate | Qwen2's                 |
| Qwen3-MoE | normalised or not             | some         |                                 | Qwen3's                 |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.convert.families.llama import common_config, decoder_refusals, dense_rules, table
from megatron.convert.parts.family import (
    FAMILIES,
    Constant,
    Family,
    Rule,
    TokenIds,
    output_bias_refusals,
    pre_norm_refusals,
    width_refusals,
)
from megatron.convert.parts.transforms import Copy, PerExpert, Split, SwapHalves
from megatron.convert.parts.windows import SLIDING, window_fields

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

# (the layer's part, then an expert's gate, up and down) in files.
_MIXTRAL_NAMES = ("block_sparse_moe", "w1", "w3", "w2")
_QWEN_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")


def moe_table(names: tuple[str, str, str, str]) -> Callable[[ModelConfig], list[Rule | Constant]]:
    """The table of a family whose files have these names."""
    return partial(table, feed_forward=partial(_feed_forward, names))


def _feed_forward(names: tuple[str, str, str, str], model: ModelConfig, block: int) -> list[Rule]:
    if model.layer_mlps[block] == "dense":
        return dense_rules(model, block)
    part, gate, up, down = names
    ours, running = f"{block + 2}.mlp.", f"model.layers.{block}.mlp."
    theirs, experts, width = f"model.layers.{block}.{part}.", range(model.moe_num_experts), model.moe_intermediate_size

    def matrices(*kinds: str) -> tuple[str, ...]:
        return tuple(f"{theirs}experts.{expert}.{kind}.weight" for expert in experts for kind in kinds)

    def rule(name: str, files: tuple[str, ...], transform: PerExpert | Copy, also: str, fused: Any) -> Rule:
        """`also`: its name in running models, `fused` the transform there."""
        return Rule(ours + name, files, transform, also=(Rule(ours + name, (running + also,), fused),))

    rows, h = PerExpert(len(experts), (width, width)), PerExpert(len(experts), (model.hidden_size,))
    rules = [
        rule("router.weight", (f"{theirs}gate.weight",), Copy(), "gate.weight", Copy()),
        rule("experts.linear1", matrices(up, gate), rows, "experts.gate_up_proj", SwapHalves(dim=1)),
        rule("experts.linear2", matrices(down), h, "experts.down_proj", Copy()),
    ]
    if shared := model.moe_shared_expert_size:
        halves = tuple(f"{running}shared_expert.{half}_proj.weight" for half in ("up", "gate"))
        rules += [
            Rule(f"{ours}shared_expert.linear1.weight", halves, Split((shared, shared))),
            Rule(f"{ours}shared_expert.linear2.weight", (f"{running}shared_expert.down_proj.weight",)),
            Rule(f"{ours}shared_expert_gate.weight", (f"{running}shared_expert_gate.weight",)),
        ]
    return rules


def _common_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    """transformers adds one balance loss of all layers together, ours are summed over layers."""
    balance = model.moe_aux_loss_coeff * model.layer_mlps.count("moe")
    return {
        **common_config(model, vocab_size, ids),
        "num_experts_per_tok": model.moe_top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": float(f"{balance:.9g}"),  # a quotient of 12 digits times its divisor is what it was
    }


def mixtral_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    window = model.layer_windows[0]
    return {
        "model_type": "mixtral",
        **_common_config(model, vocab_size, ids),
        "intermediate_size": model.moe_intermediate_size,
        "num_local_experts": model.moe_num_experts,
        "router_jitter_noise": 0.0,
        "sliding_window": None if window is None else window + 1,
    }


def olmoe_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    fields = _common_config(model, vocab_size, ids)
    del fields["head_dim"]
    return {
        "model_type": "olmoe",
        **fields,
        "intermediate_size": model.moe_intermediate_size,
        "num_experts": model.moe_num_experts,
        "norm_topk_prob": model.moe_normalize_topk,
        "attention_bias": model.use_bias_in_attn_linear,
        "clip_qkv": None,
    }


def _qwen_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    return {
        **_common_config(model, vocab_size, ids),
        "num_experts": model.moe_num_experts,
        "moe_intermediate_size": model.moe_intermediate_size,
        "norm_topk_prob": model.moe_normalize_topk,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, mlp in enumerate(model.layer_mlps) if mlp == "dense"],
    }


def qwen2_moe_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    fields, windows = _qwen_config(model, vocab_size, ids), window_fields(model)
    del fields["head_dim"]
    return {
        "model_type": "qwen2_moe",
        **fields,
        **windows,
        "use_sliding_window": SLIDING in windows["layer_types"],
        "max_window_layers": model.num_layers,
        "qkv_bias": model.use_bias_in_attn_linear,
        "shared_expert_intermediate_size": model.moe_shared_expert_size,
    }


def qwen3_moe_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    window = model.layer_windows[0]
    return {
        "model_type": "qwen3_moe",
        **_qwen_config(model, vocab_size, ids),
        "attention_bias": model.use_bias_in_attn_linear,
        "use_sliding_window": window is not None,
        "sliding_window": None if window is None else window + 1,
    }


def _moe_refusals(model: ModelConfig, *, dense: bool, normalised: bool = False, shared: bool = False) -> list[str]:
    """Of all of them. `dense`: layers without experts can be there; `normalised`: weights always are; `shared`: a
    shared expert with a gate always is."""
    reasons = decoder_refusals(model, expressed=("moe_num_experts",))
    kinds = set(model.layer_mlps)
    if "moe" not in kinds:
        reasons.append("no layer that is a mixture of experts")
    if kinds - {"moe", "dense"} or ("dense" in kinds and not dense):
        reasons.append("layers that are no mixture of experts (all of its are)")
    if model.moe_router_type != "topk":
        reasons.append(f"moe_router_type: {model.moe_router_type} (it routes by topk)")
    if model.moe_router_score != "softmax":
        reasons.append(f"moe_router_score: {model.moe_router_score} (its scores are softmax)")
    if normalised and not model.moe_normalize_topk:
        reasons.append("moe_normalize_topk: false (it normalises)")
    if model.moe_routed_scaling != 1.0:
        reasons.append(f"moe_routed_scaling: {model.moe_routed_scaling} (it does not scale)")
    if model.moe_bias_balancing_rate:
        reasons.append("moe_bias_balancing_rate (it has no biases by which experts are chosen)")
    if model.moe_expert_bias or model.use_bias_in_mlp:
        reasons.append("moe_expert_bias or use_bias_in_mlp (it has no biases there)")
    if not shared and model.moe_shared_expert_size:
        reasons.append("moe_shared_expert_size (it has no shared expert)")
    if shared and not (model.moe_shared_expert_size and model.moe_shared_expert_gate):
        reasons.append("no moe_shared_expert_size with moe_shared_expert_gate (it has both)")
    return reasons


def _uneven_windows(model: ModelConfig) -> list[str]:
    uneven = len(set(model.layer_windows or ())) > 1
    return ["attention_config with a window in some layers only"] if uneven else []


def mixtral_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*_moe_refusals(model, dense=False, normalised=True), *pre_norm_refusals(model), *_uneven_windows(model)]
    if model.use_bias_in_attn_linear:
        reasons.append("use_bias_in_attn_linear (it has no biases)")
    return reasons


def olmoe_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*_moe_refusals(model, dense=False), *output_bias_refusals(model), *width_refusals(model)]
    if model.norm_placement != "pre":
        reasons.append(f"norm_placement: {model.norm_placement}")
    if not model.use_separate_qk_norms or model.qk_norm_per_head:
        reasons.append("no use_separate_qk_norms over all heads (it normalises queries and keys so)")
    if any(window is not None for window in model.layer_windows or ()):
        reasons.append("sliding_window_width (it has full attention only)")
    return reasons


def qwen2_moe_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*_moe_refusals(model, dense=True, shared=True), *pre_norm_refusals(model), *width_refusals(model)]
    if model.use_bias_in_attn_linear and model.use_bias_in_attn_output:
        reasons.append("use_bias_in_attn_output (it has biases on queries, keys and values, not on the output)")
    return reasons


def qwen3_moe_unsupported(model: ModelConfig) -> list[str]:
    reasons = [*_moe_refusals(model, dense=True), *output_bias_refusals(model), *_uneven_windows(model)]
    if model.norm_placement != "pre":
        reasons.append(f"norm_placement: {model.norm_placement}")
    if not (model.use_separate_qk_norms and model.qk_norm_per_head):
        reasons.append("no use_separate_qk_norms with qk_norm_per_head (it normalises each head of queries and keys)")
    return reasons


for _name, _architecture, _names, _config, _unsupported in (
    ("mixtral", "MixtralForCausalLM", _MIXTRAL_NAMES, mixtral_config, mixtral_unsupported),
    ("olmoe", "OlmoeForCausalLM", _QWEN_NAMES, olmoe_config, olmoe_unsupported),
    ("qwen2_moe", "Qwen2MoeForCausalLM", _QWEN_NAMES, qwen2_moe_config, qwen2_moe_unsupported),
    ("qwen3_moe", "Qwen3MoeForCausalLM", _QWEN_NAMES, qwen3_moe_config, qwen3_moe_unsupported),
):
    FAMILIES.register(_name)(Family(_architecture, moe_table(_names), _config, _unsupported))
