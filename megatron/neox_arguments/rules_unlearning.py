"""Rules about runs that forget some of their data (`ga_dataset`)."""

from __future__ import annotations

from megatron.neox_arguments.draft import Draft
from megatron.neox_arguments.groups import all_keys

_KEYS = [name for name in all_keys() if name.startswith(("ga_", "gd_")) and name != "ga_dataset"]


def unlearning(draft: Draft) -> None:
    """Which steps forget, what they read, and that nothing else of the run contradicts it."""
    draft.positive("ga_interval", "ga_iters", "ga_lr_scale", "ga_beta", "ga_rmu_coefficient")
    draft.not_negative("gd_retain_weight", "ga_rmu_layer", "ga_rmu_seed")
    draft.not_negative("ga_interleave_ratio", zero=" (every step forgets)")
    if draft["ga_dataset"] is None:
        if draft["gd_mode"] or draft["train_impl"] == "unlearn":
            draft.fail("gd_mode" if draft["gd_mode"] else "train_impl", "needs ga_dataset, the data to forget")
        for name in _KEYS:
            if draft.is_changed(name):
                draft.report(
                    name, "nothing is forgotten without ga_dataset, the data to forget; set it, or leave this out"
                )
        return
    if draft["train_impl"] not in ("normal", "unlearn"):
        draft.fail("ga_dataset", f"forgetting is an objective of its own, and train_impl is {draft['train_impl']}")
    if draft["dataset_impl"] != "gpt2":
        draft.fail("ga_dataset", f"goes with dataset_impl: gpt2, not {draft['dataset_impl']}")
    draft.set("train_impl", "unlearn", "ga_dataset")
    for name in ("ga_interval", "ga_iters"):
        if draft["ga_mode"] == "interval" and draft[name] is None:
            draft.report(name, "must be set with ga_mode: interval (or use ga_mode: interleaved)")
    if draft["ga_mode"] == "interleaved" and draft["ga_interleave_ratio"] == 0 and draft["train_epochs"]:
        draft.report("train_epochs", "counts the training data, of which no step reads any with ga_interleave_ratio: 0")
    if draft["gd_mode"] and draft["gd_retain_dataset"] is None:
        draft.report("gd_mode", "needs gd_retain_dataset, the data to retain (it may be the training data)")
    for name in ("skip_outliers", "on_spike"):
        if draft[name]:
            draft.report(name, "would take the loss of the steps that forget for a fault; unset it")
    if draft["ga_loss"] in ("npo", "simnpo") and draft["pack_impl"] != "unpacked":
        draft.note(
            f"ga_loss: {draft['ga_loss']} compares rows, and pack_impl: {draft['pack_impl']} puts several documents "
            "into one, which are forgotten as one text and share a loss; pack_impl: unpacked forgets each by itself"
        )
    _threshold(draft)
    _misdirection(draft)


def _misdirection(draft: Draft) -> None:
    """Which block rmu steers, and which are trained for it."""
    if draft["ga_loss"] != "rmu":
        for name in _KEYS:
            if name.startswith("ga_rmu_") and draft.is_changed(name):
                draft.report(name, f"is for ga_loss: rmu; ga_loss is {draft['ga_loss']}")
        return
    if not draft["gd_mode"]:
        draft.report(
            "ga_loss", "rmu holds what is retained where it was: set gd_mode: true and gd_retain_dataset, its data"
        )
    if draft["moe_bias_balancing_rate"] > 0:
        draft.report(
            "moe_bias_balancing_rate",
            "moves biases of all blocks, and what rmu compares with does not keep them; set moe_aux_loss_coeff",
        )
    layer, count = draft["ga_rmu_layer"], draft["num_layers"]
    if layer is None:
        draft.fail("ga_loss", "rmu needs ga_rmu_layer, the block to steer, from 0 (the paper: 7 of 32)")
    if layer >= count:
        draft.fail("ga_rmu_layer", f"must be less than num_layers ({count}), is {layer}")
    if draft["ga_rmu_layers"] is None:
        draft.set("ga_rmu_layers", tuple(range(max(0, layer - 2), layer + 1)), "ga_rmu_layer and the two before")
    trained = draft["ga_rmu_layers"]
    if wrong := [one for one in trained if not 0 <= one < count]:
        draft.report("ga_rmu_layers", f"{wrong[0]} is not a block; they are 0 to {count - 1}")
    elif trained and min(trained) > layer:
        draft.report("ga_rmu_layers", f"none of them is below the output of ga_rmu_layer, block {layer}")


def _threshold(draft: Draft) -> None:
    ema = draft["ga_threshold_check_mode"] == "ema"
    if draft["ga_threshold_skip_forward"] and not ema:
        draft.note(
            f"{draft.source('ga_threshold_skip_forward')}: ga_threshold_skip_forward has no effect: "
            f"{draft['ga_threshold_check_mode']} compares the loss of the samples at hand, which only they tell"
        )
    if draft["ga_loss_threshold"] is None and draft["ga_threshold_skip_forward"]:
        draft.note(f"{draft.source('ga_threshold_skip_forward')}: has no effect without ga_loss_threshold")
