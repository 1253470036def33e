"""Rules about runs that forget some of their data (`ga_dataset`)."""

from __future__ import annotations

from megatron.neox_arguments.draft import Draft
from megatron.neox_arguments.groups import all_keys

_KEYS = [name for name in all_keys() if name.startswith(("ga_", "gd_")) and name != "ga_dataset"]


def unlearning(draft: Draft) -> None:
    """Which steps forget, what they read, and that nothing else of the run contradicts it."""
    draft.positive("ga_interval", "ga_iters", "ga_interleave_ratio", "ga_lr_scale", "ga_beta")
    draft.not_negative("gd_retain_weight")
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
    if draft["gd_mode"] and draft["gd_retain_dataset"] is None:
        draft.report("gd_mode", "needs gd_retain_dataset, the data to retain (it may be the training data)")
    for name in ("skip_outliers", "on_spike"):
        if draft[name]:
            draft.report(name, "would take the loss of the steps that forget for a fault; unset it")
    _threshold(draft)


def _threshold(draft: Draft) -> None:
    ema = draft["ga_threshold_check_mode"] == "ema"
    if draft["ga_threshold_skip_forward"] and not ema:
        draft.note(
            f"{draft.source('ga_threshold_skip_forward')}: ga_threshold_skip_forward has no effect: "
            f"{draft['ga_threshold_check_mode']} compares the loss of the samples at hand, which only they tell"
        )
    if draft["ga_loss_threshold"] is None and draft["ga_threshold_skip_forward"]:
        draft.note(f"{draft.source('ga_threshold_skip_forward')}: has no effect without ga_loss_threshold")
