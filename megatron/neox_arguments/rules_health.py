"""Rules about what watches over the numbers of a run."""

from __future__ import annotations

from typing import Any

from megatron.neox_arguments.block_sizes import HEADLESS
from megatron.neox_arguments.draft import Draft

_WINDOW: dict[str, Any] = {"window": 128, "sigma": 6.0}

_SPIKE: dict[str, Any] = {"steps": 3, "before": 8, "most": 3}


def outliers(draft: Draft) -> None:
    """skip_outliers as {window, sigma}; None when it is off."""
    given = draft["skip_outliers"]
    if given is None or given is False:
        draft.set("skip_outliers", None, "skip_outliers")
        return
    asked = given if isinstance(given, dict) else {} if given is True else {"window": given}
    found = {**_WINDOW, **asked}
    check_window(draft, "skip_outliers", found)
    draft.set("skip_outliers", found, "skip_outliers")


def spikes(draft: Draft) -> None:
    """on_spike with all of its values; rewinding needs checkpoints."""
    given = draft["on_spike"]
    if given is None:
        draft.set("on_spike", None, "on_spike")
        return
    found = {"do": "warn", **_WINDOW, **_SPIKE, **(given if isinstance(given, dict) else {"do": given})}
    if found["do"] not in ("warn", "rewind"):
        draft.fail("on_spike", f"is {found['do']!r}; warn or rewind")
    check_window(draft, "on_spike", found)
    if found["steps"] < 1:
        draft.fail("on_spike.steps", f"is {found['steps']}; at least 1")
    if found["do"] == "rewind" and not draft["save"]:
        draft.fail("on_spike", "rewind needs checkpoints to go back to; set save and checkpoint_factor, or use warn")
    for key in ("no_save_optim", "no_save_rng"):
        if found["do"] == "rewind" and draft[key]:
            draft.fail(
                "on_spike", f"rewind needs all of a checkpoint, and {key} leaves a part out; unset it, or use warn"
            )
    draft.set("on_spike", found, "on_spike")


def gradient_noise(draft: Draft) -> None:
    """The gradient noise scale compares batches, whose gradients have one scale."""
    if not draft["log_gradient_noise_scale"]:
        return
    if draft["gradient_noise_scale_n_batches"] < 2:
        draft.report("gradient_noise_scale_n_batches", f"is {draft['gradient_noise_scale_n_batches']}; at least 2")
    if draft["precision"] == "fp16":
        draft.report("log_gradient_noise_scale", "does not know the changing loss scale of fp16; use bfloat16")


def attention(draft: Draft) -> None:
    """What is monitored has steps to be monitored at, and exists."""
    if not draft["monitor_attention"]:
        return
    if draft["monitor_interval"] <= 0:
        draft.report("monitor_attention", "happens every monitor_interval steps, which is unset; set it, to 100 say")
    if set(draft["attention_config"]) <= set(HEADLESS):
        draft.report("monitor_attention", "there is no attention layer in attention_config; leave it out")


def check_window(draft: Draft, name: str, found: dict[str, Any]) -> None:
    """A mean and a deviation need values, and a limit lies above the mean."""
    if found["window"] < 4:
        draft.fail(f"{name}.window", f"is {found['window']}; at least 4 steps")
    if found["sigma"] <= 0:
        draft.fail(f"{name}.sigma", f"is {found['sigma']:g}; above 0 (6 is usual)")
