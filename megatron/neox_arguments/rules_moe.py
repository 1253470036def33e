"""Rules about mixtures of experts."""

from __future__ import annotations

from typing import Any

from megatron.errors import nearest
from megatron.neox_arguments.draft import Draft
from megatron.neox_arguments.rules_model import expand, without_mlp
from megatron.registry import added

_KINDS = ("dense", "moe")
# Keys that mean nothing without experts; GPT-NeoX's own are let pass, its files may carry them.
_NEEDS_EXPERTS = (
    "moe_layers", "moe_router_score", "moe_normalize_topk", "moe_routed_scaling", "moe_capacity_factor",
    "moe_intermediate_size", "moe_expert_bias", "moe_shared_expert_size", "moe_shared_expert_gate",
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_bias_balancing_rate",
)  # fmt: skip
_TOPK_ONLY = {
    "moe_router_score": "it weighs by sigmoid (moe_top_k 1) or softmax",
    "moe_normalize_topk": "it does not normalise",
    "moe_routed_scaling": "it does not scale",
    "moe_jitter_eps": "it takes no noise",
    "moe_bias_balancing_rate": "it balances by itself",
    "moe_aux_loss_coeff": "it balances by itself",
}


def layer_mlps(draft: Draft) -> None:
    """The feed-forward of each layer."""
    draft.positive("moe_num_experts", "moe_expert_interval")
    mixers, layers = draft["attention_config"], draft["num_layers"]
    given, interval = draft["moe_layers"], draft["moe_expert_interval"]
    plain = _plain(draft, layers)
    if draft["moe_num_experts"] == 1:
        wanted = list(plain)
    elif given is None:
        wanted = [plain[layer] if layer % interval else "moe" for layer in range(layers)]
    else:
        if draft.is_changed("moe_expert_interval"):
            draft.fail("moe_layers", "moe_expert_interval is set too; keep one of the two")
        listed = zip(_list_layers(draft, given, layers), plain, strict=True)
        wanted = [mlp if mlp == "moe" else other for mlp, other in listed]
    mlps = ["none" if without_mlp(mixer) else mlp for mixer, mlp in zip(mixers, wanted, strict=True)]
    if given is not None:
        for place, (mlp, asked) in enumerate(zip(mlps, wanted, strict=True)):
            if asked == "moe" != mlp:
                draft.fail("moe_layers", f"layer {place} is {mixers[place]!r}, which has no feed-forward")
    if draft["moe_num_experts"] > 1 and "moe" not in mlps:
        draft.fail("moe_num_experts", f"{draft['moe_num_experts']} experts, but no layer is a mixture of experts")
    draft.set("layer_mlps", tuple(mlps), "attention_config, moe_expert_interval or moe_layers")


def _plain(draft: Draft, layers: int) -> tuple[str, ...]:
    """The feed-forward of each layer, were it no mixture of experts: mlp_config."""
    plugged = {name.lower(): name for name in added("mlp_config")}
    choices = {"dense": "dense", **plugged}

    def kind(name: Any) -> str:
        if str(name).lower() not in choices:
            hint = nearest(str(name), list(choices.values()))
            listed = ", ".join(choices.values())
            draft.fail("mlp_config", f"{name!r} is not a kind of feed-forward.{hint} Choices: {listed}")
        return choices[str(name).lower()]

    given = draft["mlp_config"] or ("dense",)
    if len(given) == 1 and isinstance(given[0], str):
        return (kind(given[0]),) * layers
    kinds = expand(draft, "mlp_config", given, layers, kind)
    if len(kinds) != layers:
        draft.fail("mlp_config", f"describes {len(kinds)} layers, num_layers is {layers}")
    return kinds


def _list_layers(draft: Draft, given: tuple[Any, ...], layers: int) -> list[str]:
    if all(isinstance(one, int) and not isinstance(one, bool) for one in given):
        if wrong := [one for one in given if not 0 <= one < layers]:
            draft.fail("moe_layers", f"there is no layer {wrong[0]}; layers are numbered from 0 to {layers - 1}")
        return ["moe" if layer in given else "dense" for layer in range(layers)]

    def kind(name: Any) -> str:
        if name not in _KINDS:
            draft.fail("moe_layers", f"{name!r} is not dense or moe.{nearest(str(name), list(_KINDS))}")
        return str(name)

    kinds = expand(draft, "moe_layers", given, layers, kind)
    if len(kinds) != layers:
        draft.fail("moe_layers", f"describes {len(kinds)} layers, num_layers is {layers}")
    return list(kinds)


def mixture_of_experts(draft: Draft) -> None:
    """Sizes of the experts, and their division over tensor-parallel ranks."""
    draft.positive("moe_top_k")
    draft.check(lambda value: 0 <= value < 1, "must be in [0, 1)", "moe_jitter_eps")
    if "moe" not in draft["layer_mlps"]:
        for name in _NEEDS_EXPERTS:
            if draft.is_changed(name):
                draft.report(name, "no layer is a mixture of experts; set moe_num_experts above 1, or leave it out")
        return
    draft.positive("moe_intermediate_size", "moe_capacity_factor", "moe_routed_scaling")
    draft.not_negative("moe_shared_expert_size", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_bias_balancing_rate")
    experts, chosen, tensor = draft["moe_num_experts"], draft["moe_top_k"], draft["model_parallel_size"]
    if chosen > experts:
        draft.fail("moe_top_k", f"{chosen} experts per token, but there are {experts} (moe_num_experts)")
    if experts % tensor:
        draft.fail(
            "model_parallel_size",
            f"{experts} experts (moe_num_experts) do not divide over {tensor} tensor-parallel ranks; a rank holds whole"
            " experts",
        )
    width = draft.get_given("moe_intermediate_size") or draft["ffn_width"]
    draft.set("moe_intermediate_size", width, "the width of a dense layer")
    shared = draft["moe_shared_expert_size"]
    if draft["moe_shared_expert_gate"] and not shared:
        draft.fail("moe_shared_expert_gate", "there is no shared expert; set moe_shared_expert_size")
    if shared % tensor:
        draft.fail("moe_shared_expert_size", f"{shared} cannot be split over {tensor} tensor-parallel ranks")


def router(draft: Draft) -> None:
    """Keys that go together in a router."""
    if "moe" not in draft["layer_mlps"]:
        return
    if draft["moe_router_type"] == "sinkhorn":
        for name, why in _TOPK_ONLY.items():
            if draft.is_changed(name):
                source = "set" if draft.is_set("moe_router_type") else "the default, as in GPT-NeoX"
                draft.fail(name, f"does not go with moe_router_type: sinkhorn ({source}): {why}; use topk")
    if draft["moe_normalize_topk"] and draft["moe_top_k"] == 1:
        draft.note(
            "moe_normalize_topk with moe_top_k 1 makes every weight 1, so that the router learns from balance and"
            " z-losses alone"
        )


def bias_balancing(draft: Draft) -> None:
    """ZeRO-3 cuts up the biases, which are moved outside the optimizer."""
    if draft["moe_bias_balancing_rate"] > 0 and draft["zero_stage"] == 3:
        draft.fail("moe_bias_balancing_rate", "does not go with ZeRO stage 3; use stage 2, or moe_aux_loss_coeff")
