"""What families with mixtures of experts have in common (attention is that of their dense relatives: decoder.py).

Files have three matrices for each expert, running models two tensors of all experts of a layer; either is read, the
first is written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.convert.parts.decoder import decoder_config, decoder_refusals, decoder_table, dense_rules
from megatron.convert.parts.family import Constant, Rule, TokenIds
from megatron.convert.parts.fields import Fields
from megatron.convert.parts.transforms import Copy, PerExpert, Split, SwapHalves
from megatron.errors import UserError

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


# (the layer's part, then an expert's gate, up and down) in files of most.
EXPERT_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")


def experts_table(names: tuple[str, str, str, str] = EXPERT_NAMES) -> Callable[[ModelConfig], list[Rule | Constant]]:
    """The table of a family whose files have these names."""
    return partial(decoder_table, feed_forward=partial(_feed_forward, names))


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


def experts_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    """transformers has one balance loss of all layers together, ours are summed over layers."""
    balance = model.moe_aux_loss_coeff * model.layer_mlps.count("moe")
    return {
        **decoder_config(model, vocab_size, ids),
        "num_experts_per_tok": model.moe_top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": float(f"{balance:.9g}"),  # a quotient of 12 digits times its divisor is what it was
    }


def experts_refusals(model: ModelConfig, *, dense: bool, normalised: bool = False, shared: bool = False) -> list[str]:
    """What no family with experts expresses.

    `dense`: layers without experts are possible; `normalised`: weights always are; `shared`: it always has a shared
    expert with a gate.
    """
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


def experts_keys(
    fields: Fields, *, experts: int, per_token: int, coefficient: float, layers: list[int]
) -> dict[str, Any]:
    """What all have; the first three are the defaults of transformers' class, `layers` those that have experts."""
    fields.take("output_router_logits", None)  # whether training with transformers adds the balance loss
    named = {name: fields.take(name, None) for name in ("num_experts", "num_local_experts")}
    counts = {name: count for name, count in named.items() if count is not None}
    if len(set(counts.values())) > 1:
        raise UserError(f"{fields.where}: num_experts and num_local_experts differ: {counts}")
    if not layers:
        raise UserError(f"{fields.where}: no layer has experts; such a model cannot be expressed as this one")
    total = fields.take("num_hidden_layers")
    # transformers adds one balance loss of all layers together, ours are summed over layers
    balance = fields.take("router_aux_loss_coef", coefficient) / len(layers)
    return {
        "moe_num_experts": next(iter(counts.values()), experts),
        "moe_top_k": fields.take("num_experts_per_tok", per_token),
        "moe_router_type": "topk",
        "moe_aux_loss_coeff": float(f"{balance:.12g}"),
        **({} if len(layers) == total else {"moe_layers": layers}),
    }


def all_layers(fields: Fields) -> list[int]:
    return list(range(fields.take("num_hidden_layers")))
