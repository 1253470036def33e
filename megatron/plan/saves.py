"""Which steps are saved, and how much disk that takes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.cadence import save_steps
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.formulas import ParameterCount
from megatron.neox_arguments.rules_rollouts import keeps_reference
from megatron.plan.memory import moments


@dataclass(frozen=True)
class Saves:
    """`bytes_each` is what one checkpoint takes, `free` what the file system of `save` has."""

    steps: list[int]
    kept: int
    bytes_each: float
    free: int | None


def saves_of(args: NeoXArgs, count: ParameterCount, first: int = 0) -> Saves | None:
    """The checkpoints of the whole run, which begins at step `first`; None when `save` is not set.

    `count`: of the whole model. One checkpoint holds the weights in the run's precision and, with optimizer state, fp32
    masters and the tensors that the optimizer keeps.
    """
    checkpoint, steps = args.checkpoint, args.training.train_iters or 0
    if checkpoint.save is None:
        return None
    saved = save_steps(
        steps,
        scale=checkpoint.checkpoint_scale,
        factor=checkpoint.checkpoint_factor,
        extra=checkpoint.extra_save_iters,
    )
    saved = [step for step in saved if step > first or first == 0]  # at 0 the initial weights may be saved
    keep = checkpoint.keep_last_n_checkpoints
    extra = len(set(checkpoint.extra_save_iters or ()) & set(saved[:-keep])) if keep and keep > 0 else 0
    kept = min(len(saved), keep + extra) if keep and keep > 0 else len(saved)
    minutes = checkpoint.temporary_checkpoint_minutes
    kept += minutes is not None and minutes > 0  # one at a time
    weight = 4 if args.optimizer.precision == "fp32" else 2
    each: float = weight * count.total
    if not checkpoint.no_save_optim:
        kinds = 1 + moments(args.optimizer) + (args.optimizer.ema_decay is not None) + keeps_reference(args.get)
        fewer = moments(args.optimizer) - moments(args.optimizer, of_blocks=True)
        each += 4 * (kinds * count.total - fewer * count.layers)
    return Saves(saved, kept, each, _free(Path(checkpoint.save)))


def _free(path: Path) -> int | None:
    """Free bytes where `path` is or would be."""
    for folder in (path, *path.absolute().parents):
        if folder.is_dir():
            return shutil.disk_usage(folder).free
    return None
