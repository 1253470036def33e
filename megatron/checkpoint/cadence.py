"""When checkpoints are written. Steps count completed optimizer steps, as NeoX's `iteration`."""

from __future__ import annotations

from collections.abc import Collection

from megatron.errors import UserError


def is_save_step(
    step: int,
    *,
    scale: str = "linear",
    factor: float | None = None,
    extra: Collection[int] | None = None,
    last: int | None = None,
) -> bool:
    """Whether a checkpoint is due after `step` steps.

    Args:
        scale: `checkpoint_scale`: "linear" (every `factor` steps) or "log" (at the whole parts of factor^0, ^1, ...).
        factor: `checkpoint_factor`; None or <= 0 switches the periodic part off.
        extra: `extra_save_iters`; step 0 is saved only if it is among them.
        last: the run's last step, which is always saved.

    Source: `save_iters` of GPT-NeoX (log, factor 1.5: 1, 2, 3, 5, 7, 11, 17, 25, 38, 57, 86).
    """
    if step in (extra or ()):
        return True
    if step <= 0:
        return False
    if step == last:
        return True
    return _is_periodic(step, scale, factor)


def save_steps(
    last: int, *, scale: str = "linear", factor: float | None = None, extra: Collection[int] | None = None
) -> list[int]:
    """All steps of a run of `last` steps after which a checkpoint is written, ascending."""
    near = {*(extra or ()), last}
    if factor is not None and factor > 0:
        if scale == "log":
            power = 1.0
            while power <= last:
                near.add(int(power))
                power *= factor
        else:
            near.update(range(0, last + 1, int(factor)))
    options = {"scale": scale, "factor": factor, "extra": extra, "last": last}
    return [s for s in sorted(near) if 0 <= s <= last and is_save_step(s, **options)]


def _is_periodic(step: int, scale: str, factor: float | None) -> bool:
    if factor is None or factor <= 0:
        return False
    if scale == "linear":
        if factor != int(factor):
            raise UserError(f"checkpoint_factor: {factor} with checkpoint_scale linear must be a whole number of steps")
        return step % int(factor) == 0
    if scale != "log":
        raise UserError(f"checkpoint_scale: {scale!r} is not known. Choices: linear, log")
    if factor <= 1:
        raise UserError(
            f"checkpoint_factor: {factor} with checkpoint_scale log must be above 1 (2 doubles the distance)"
        )
    power = 1.0
    while int(power) < step:
        power *= factor
    return int(power) == step
