"""Keys of runs that forget: what the fork's configs set, and what is wrong about others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import UserError
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.describe import describe
from megatron.neox_arguments.differences import differences_for
from megatron.neox_arguments.inference import for_inference
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu

DATA = {"data_path": "retain_document", "ga_dataset": "forget_document"}
INTERLEAVED = {**DATA, "ga_mode": "interleaved", "ga_interleave_ratio": 2}
RETAINED = {**INTERLEAVED, "gd_mode": True, "gd_retain_dataset": "retain_document"}
RMU = {**RETAINED, "ga_loss": "rmu", "ga_rmu_layer": 0}
EPOCHS = {"train_iters": None, "train_epochs": 2}
BALANCED = {"moe_num_experts": 4, "moe_router_type": "topk", "moe_bias_balancing_rate": 0.001}
# The two recipes of the fork's 64 configs, with what else they set that matters here.
MIDTRAINING: dict[str, Any] = {
    **DATA,
    "train_iters": 12015,
    "ga_dataset_impl": "mmap",
    "ga_mode": "interleaved",
    "ga_lr_scale": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 2.25e-4}},
    "te_mha": True,
    "te_layernorm_mlp": True,
    "eval_tasks": ["wmdp_bio_aisi_robust", "wmdp_bio_cloze_verified", "mmlu_bio"],
    "eval_interval": 2000,
}
DIFFERENCE: dict[str, Any] = {
    **MIDTRAINING,
    "train_iters": 148,
    "ga_interleave_ratio": 1,
    "gd_mode": True,
    "gd_retain_dataset": "retain_document",
    "gd_retain_dataset_impl": "mmap",
    "gd_log_separate_losses": True,
    "eval_interval": 10,
}


@pytest.mark.parametrize("ratio", [2, 4, 8, 16, 32, 128, 256])
def test_midtraining_of_the_fork(tmp_path: Path, ratio: int) -> None:
    args = derived(tmp_path, **MIDTRAINING, ga_interleave_ratio=ratio)
    plan = BatchPlan.of(args)
    ascents = [k for k in range(12015) if k > 0 and k % (ratio + 1) == 0]
    assert plan.only("forget").samples(12015) == len(ascents) * args.training.train_batch_size
    assert args.training.train_impl == "unlearn" and plan.samples(12015) == 12015 * args.training.train_batch_size
    assert any(f"{len(ascents):,} of 12,015 steps" in line for line in describe(args))


@pytest.mark.parametrize("weight", [10, 20, 40, 80, 120])
def test_gradient_difference_of_the_fork(tmp_path: Path, weight: int) -> None:
    for lr in (1e-5, 2.25e-4):
        keys = {**DIFFERENCE, "optimizer": {"type": "Adam", "params": {"lr": lr}}}
        args = derived(tmp_path, **keys, gd_retain_weight=weight)
        plan = BatchPlan.of(args)
        assert [plan.sources(k) for k in (0, 1, 2, 3)] == [("train",), ("train",), ("forget", "retain"), ("train",)]
        assert args.get("gd_retain_weight") == weight and any(
            line.startswith("gd_mode") for line in differences_for(args)
        )


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"gd_mode": True}, "gd_mode: needs ga_dataset"),
        ({**INTERLEAVED, "gd_mode": True}, "gd_mode: needs gd_retain_dataset"),
        ({**DATA}, "ga_interval: must be set with ga_mode: interval"),
        ({**DATA, "ga_interval": 3}, "ga_iters: must be set with ga_mode: interval"),
        ({**INTERLEAVED, "ga_interleave_ratio": -1}, "ga_interleave_ratio: must be 0 (every step forgets) or more"),
        ({**INTERLEAVED, "ga_interleave_ratio": 0, **EPOCHS}, "train_epochs: counts the training data"),
        ({**INTERLEAVED, "ga_loss": "rmu", "ga_rmu_layer": 1}, "ga_loss: rmu holds what is retained"),
        ({**RETAINED, "ga_loss": "rmu"}, "ga_loss: rmu needs ga_rmu_layer"),
        ({**RETAINED, "ga_loss": "rmu", "ga_rmu_layer": 99}, "ga_rmu_layer: must be less than num_layers"),
        ({**RMU, "ga_rmu_layers": [99]}, "ga_rmu_layers: 99 is not a block; they are 0 to "),
        ({**RMU, "ga_rmu_layers": [1]}, "ga_rmu_layers: none of them is below the output of ga_rmu_layer, block 0"),
        ({**RMU, "ga_rmu_coefficient": 0.0}, "ga_rmu_coefficient: must be above 0"),
        ({**RMU, **BALANCED}, "moe_bias_balancing_rate: moves biases of all blocks"),
        ({**INTERLEAVED, "ga_rmu_layer": 1}, "ga_rmu_layer: is for ga_loss: rmu; ga_loss is ascent"),
        ({**INTERLEAVED, "ga_lr_scale": -1.0}, "ga_lr_scale: must be above 0, is -1.0"),
        ({**INTERLEAVED, "on_spike": "warn"}, "on_spike: would take the loss of the steps that forget for a fault"),
        ({**INTERLEAVED, "skip_outliers": True}, "skip_outliers: would take"),
        ({**INTERLEAVED, "z_loss_weight": 1e-4}, "z_loss_weight: "),
        ({"train_impl": "unlearn", "data_path": "x"}, "train_impl: needs ga_dataset"),
        ({"ga_interleave_ratio": 4, "data_path": "x"}, "ga_interleave_ratio: nothing is forgotten without ga_dataset"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_line(tmp_path: Path, keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as error:
        derived(tmp_path, **keys)
    assert problem in str(error.value)


def test_keys_that_do_nothing_are_said(tmp_path: Path) -> None:
    args = derived(tmp_path, **INTERLEAVED, ga_loss_threshold=3.0, ga_threshold_skip_forward=True)
    assert any("ga_threshold_skip_forward has no effect" in note for note in args.notes)
    assert args.training.train_impl == "unlearn"


def test_rmu_trains_the_block_and_the_two_before(tmp_path: Path) -> None:
    assert derived(tmp_path, **RMU).get("ga_rmu_layers") == (0,)
    keys = {**RMU, "num_layers": 8, "ga_rmu_layer": 5}
    assert derived(tmp_path, **keys).get("ga_rmu_layers") == (3, 4, 5)
    assert derived(tmp_path, **keys, ga_rmu_layers=[]).get("ga_rmu_layers") == ()


def test_generation_and_evaluation_do_not_ask_what_was_forgotten(tmp_path: Path) -> None:
    args = derive(
        for_inference(derived(tmp_path, **{**DIFFERENCE, "te_layernorm_mlp": False, "te_mha": False}, lora_r=4))
    )
    assert not args.get("gd_mode") and args.get("lora_r") == 4
    assert not [note for note in args.notes if "ga_" in note or "gd_" in note]


@pytest.mark.parametrize("keys", [INTERLEAVED, RMU, {**DATA, "ga_interval": 3, "ga_iters": 2}])
def test_texts_to_forget_are_scored_beforehand(tmp_path: Path, keys: dict[str, Any]) -> None:
    scored = {**keys, "text_gen_type": "precompute", "precompute_model_name": "base"}
    assert derive(for_inference(derived(tmp_path, **scored))).data.ga_dataset == "forget_document"


def test_epochs_count_the_training_data_alone(tmp_path: Path) -> None:
    keys = {**INTERLEAVED, "train_iters": None, "train_epochs": 2}
    args = derived(tmp_path, facts=Facts(epoch_samples=40), **keys)
    plan = BatchPlan.of(args)
    assert plan.only("train").samples(args.training.train_iters) == 80


@pytest.mark.parametrize("loss", ["npo", "simnpo"])
def test_documents_that_share_a_row_share_a_loss(tmp_path: Path, loss: str) -> None:
    """What is compared is a row: said, unless each holds one document."""
    for packing, said in (("packed", True), ("best_fit", True), ("unpacked", False)):
        args = derived(tmp_path, **INTERLEAVED, ga_loss=loss, pack_impl=packing)
        assert any(f"pack_impl: {packing} puts several documents" in note for note in args.notes) is said
    assert not any("puts several documents" in note for note in derived(tmp_path, **INTERLEAVED).notes)
