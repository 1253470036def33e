"""Keys of mixtures of experts: which layers, sizes, and what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import UserError
from megatron.neox_arguments.formulas import flops_per_token, parameter_count
from tests.neox_args.helpers import derived, loaded

pytestmark = pytest.mark.cpu

TOPK: dict[str, Any] = {"moe_num_experts": 8, "moe_router_type": "topk", "moe_top_k": 2}


@pytest.mark.parametrize(
    ("changes", "mlps"),
    [
        ({}, "dddd"),
        ({"moe_num_experts": 1, "moe_expert_interval": 1}, "dddd"),
        ({"moe_num_experts": 4}, "mmmm"),
        # GPT-NeoX: layer_idx % interval == 0
        ({"moe_num_experts": 4, "moe_expert_interval": 2}, "mdmd"),
        ({"moe_num_experts": 4, "moe_expert_interval": 3}, "mddm"),
        ({"moe_num_experts": 4, "moe_layers": [3, 1]}, "dmdm"),
        ({"moe_num_experts": 4, "moe_layers": [[["dense"], 1], [["moe"], 3]]}, "dmmm"),
        ({"moe_num_experts": 4, "moe_layers": [[["dense", "moe"], "all"]]}, "dmdm"),
        ({"moe_num_experts": 4, "moe_layers": ["moe", "dense", "dense", "moe"]}, "mddm"),
        ({"moe_num_experts": 4, "attention_config": [[["mamba", "global"], 2]]}, "nmnm"),
        ({"moe_num_experts": 4, "attention_config": [[["mamba", "global"], 2]], "moe_layers": [1]}, "nmnd"),
    ],
    ids=str,
)
def test_which_layers(changes: dict[str, Any], mlps: str, tmp_path: Path) -> None:
    model = derived(tmp_path, **changes).model
    assert "".join(mlp[0] for mlp in model.layer_mlps) == mlps


def test_an_expert_is_as_wide_as_a_dense_layer_unless_it_says_otherwise(tmp_path: Path) -> None:
    assert derived(tmp_path, **TOPK, intermediate_size=96).model.moe_intermediate_size == 96
    assert derived(tmp_path, **TOPK, intermediate_size=96, moe_intermediate_size=40).model.moe_intermediate_size == 40


def test_gpt_neox_keys_of_a_dense_model_are_let_pass(tmp_path: Path) -> None:
    args = derived(tmp_path, moe_num_experts=1, moe_expert_interval=2, moe_top_k=2, moe_router_type="topk")
    assert args.notes == () and set(args.model.layer_mlps) == {"dense"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_num_experts": 0}, "moe_num_experts: must be above 0, is 0"),
        ({**TOPK, "moe_expert_interval": 0}, "moe_expert_interval: must be above 0, is 0"),
        ({**TOPK, "moe_top_k": 9}, r"moe_top_k: 9 .*\b8 \(moe_num_experts\)"),
        (
            {**TOPK, "moe_num_experts": 6, "model_parallel_size": 4},
            r"model_parallel_size: 6 experts \(moe_num_experts\) .*\b4 tensor-parallel",
        ),
        (
            {**TOPK, "moe_layers": [1], "moe_expert_interval": 2},
            "moe_layers: moe_expert_interval .*keep one",
        ),
        ({**TOPK, "moe_layers": [1, 4]}, r"moe_layers: .*layer 4; .*0 to 3\b"),
        ({**TOPK, "moe_layers": ["moe", "dense"]}, "moe_layers: describes 2 layers, num_layers is 4"),
        ({**TOPK, "moe_layers": [[["dens", "moe"], 2]]}, "moe_layers: 'dens' is not dense or moe."),
        ({**TOPK, "moe_layers": [[["dense"], "some"]]}, "moe_layers: 'some' .*'all'"),
        ({**TOPK, "moe_layers": ["dense"] * 4}, "moe_num_experts: 8 .*no layer"),
        (
            {**TOPK, "moe_layers": [0, 1], "attention_config": [[["mamba", "global"], 2]]},
            "moe_layers: layer 0 is 'mamba'",
        ),
        (
            {**TOPK, "moe_layers": [2], "attention_config": [[["mamba", "global"], 2]]},
            "moe_layers: layer 2 is 'mamba'",
        ),
        (
            {"moe_aux_loss_coeff": 0.1},
            "moe_aux_loss_coeff: no layer .*moe_num_experts above 1",
        ),
        ({"moe_layers": [1]}, "moe_layers: no layer .*moe_num_experts above 1"),
        ({**TOPK, "moe_capacity_factor": 0}, "moe_capacity_factor: must be above 0, is 0"),
        ({**TOPK, "moe_z_loss_coeff": -1}, "moe_z_loss_coeff: .*0 or more, is -1"),
        ({**TOPK, "moe_jitter_eps": 1.5}, r"moe_jitter_eps: must be in \[0, 1\), is 1\.5"),
        ({**TOPK, "moe_shared_expert_gate": True}, "moe_shared_expert_gate: .*moe_shared_expert_size"),
        (
            {**TOPK, "moe_shared_expert_size": 31, "model_parallel_size": 2},
            r"moe_shared_expert_size: 31 .*\b2 tensor-parallel",
        ),
        (
            {"moe_num_experts": 4, "moe_aux_loss_coeff": 0.1},
            r"moe_aux_loss_coeff: .*moe_router_type: sinkhorn \(.*default.*\): .*use topk",
        ),
        (
            {"moe_num_experts": 4, "moe_router_type": "sinkhorn", "moe_normalize_topk": True},
            r"moe_normalize_topk: .*moe_router_type: sinkhorn \(set\): .*use topk",
        ),
        (
            {"moe_num_experts": 4, "moe_router_score": "sigmoid"},
            "moe_router_score: .*moe_router_type: sinkhorn",
        ),
        (
            {**TOPK, "moe_bias_balancing_rate": 0.1, "zero_optimization": {"stage": 3}},
            "moe_bias_balancing_rate: .*ZeRO stage 3; use stage 2, or moe_aux_loss_coeff",
        ),
    ],
    ids=str,
)
def test_mistakes(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        derived(tmp_path, **changes)


def test_sinkhorn_takes_several_experts_as_in_gpt_neox(tmp_path: Path) -> None:
    model = derived(tmp_path, moe_num_experts=4, moe_top_k=2).model
    assert (model.moe_router_type, model.moe_top_k) == ("sinkhorn", 2)


def test_a_router_that_cannot_learn_is_pointed_out(tmp_path: Path) -> None:
    (note,) = derived(tmp_path, moe_num_experts=4, moe_router_type="topk", moe_normalize_topk=True).notes
    assert "every weight 1" in note


def test_resolved_values_derive_again(tmp_path: Path) -> None:
    args = derived(tmp_path, **TOPK, moe_layers=[[["dense"], 1], [["moe"], 3]], moe_capacity_factor=1.25)
    again = type(args).from_saved(args.to_dict())
    assert again.model == args.model


@pytest.mark.parametrize("gated", [False, True])
def test_sizes_by_hand(gated: bool, tmp_path: Path) -> None:
    keys = {**TOPK, "moe_layers": [1], "moe_intermediate_size": 40, "use_bias_in_mlp": False, "num_layers": 2}
    if gated:
        keys |= {"activation": "swiglu", "intermediate_size": 96, "gated_width_rule": "final"}
    else:
        keys |= {"intermediate_size": 96}
    more = {"moe_shared_expert_size": 24, "moe_shared_expert_gate": True, "moe_bias_balancing_rate": 0.1}
    h, matrices = 64, 3 if gated else 2
    dense = derived(tmp_path, **{k: v for k, v in keys.items() if "moe" not in k}).model
    model = derived(tmp_path, **keys, **more, moe_expert_bias=True).model
    biases = (2 if gated else 1) * 40 + h
    expert = matrices * 40 * h + biases
    layer = 8 * expert + 8 * h + 8 + matrices * 24 * h + h
    count, plain = parameter_count(model, 100), parameter_count(dense, 100)
    assert count.total - plain.total == layer - matrices * 96 * h
    assert count.total - count.active == 6 * expert
    extra = flops_per_token(model, 100) - flops_per_token(dense, 100)
    assert extra == 6 * (layer - 6 * expert - matrices * 96 * h)
    block = count.blocks[1]
    replicated = plain.blocks[1].replicated + 8 * h + 8 + h
    assert block.local(2) == (block.total - replicated) // 2 + replicated
    assert block.local(2, 4) == block.local(2) - 8 * expert * 3 // 8


def test_retired_key_says_what_it_is_now(tmp_path: Path) -> None:
    (note,) = loaded(tmp_path, moe_lbl_in_fp32=True).notes
    assert "moe_aux_loss_coeff" in note
