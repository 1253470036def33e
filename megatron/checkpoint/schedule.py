"""GPT-NeoX's rule for the learning-rate schedule of a resumed run: equal to the checkpoint's, or a key decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.errors import UserError

SCHEDULE = (
    *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "warmup"),
    *("lr_cooldown", "lr_cooldown_style", "lr_cycles", "lr_rewarmup", "lr_decay_power"),
)


def resume_schedule(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, override: bool, use_checkpoint: bool
) -> dict[str, Any]:
    """The values of `SCHEDULE` for a resumed run.

    Args:
        saved, current: resolved flat configurations of the checkpoint and of this start. A key that an older or
            converted checkpoint lacks is taken from `current`.
        override: `override_lr_scheduler`: this config's values.
        use_checkpoint: `use_checkpoint_lr_scheduler`: the checkpoint's values.

    Raises `UserError` naming the values that differ when neither is set.
    """
    here = {key: _value(current[key]) for key in SCHEDULE if key in current}
    there = {key: _value(saved.get(key, now)) for key, now in here.items()}
    if use_checkpoint:
        return there
    if not override and _meaning(there) != _meaning(here):
        lines = "\n".join(
            f"  {key}: {there[key]!r} in the checkpoint, now {here[key]!r}" for key in here if there[key] != here[key]
        )
        raise UserError(
            f"the learning-rate schedule changed since the checkpoint:\n{lines}\n"
            "Set use_checkpoint_lr_scheduler: true to keep the checkpoint's (its length too, when train_iters grew), "
            "or override_lr_scheduler: true to use the config's."
        )
    return here


def _meaning(values: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides the learning rate: a constant one has a warm-up but no length."""
    if values["lr_decay_style"] != "constant" or values["lr_decay_iters"] is None:
        return tuple(values.values())
    # Steps that were divided by a length are not quite whole.
    return values["lr"], values["min_lr"], "constant", round(values["warmup"] * values["lr_decay_iters"], 6)


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
