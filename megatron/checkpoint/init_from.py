"""`init_from`: a new run that starts from a checkpoint of another, with what it inherits named key by key.

It is for the first start only. From its first checkpoint on the run is resumed like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.manifest import Manifest
from megatron.errors import UserError


@dataclass(frozen=True)
class InitFrom:
    """The keys of `init_from`.

    Attributes:
        path: a folder of checkpoints, or one of the checkpoints in it.
        iteration: which of them; None: the latest.
        data: `continue` the order of the samples after those consumed, or `restart` with an order of its own.
        optimizer: `keep` moments, update count and loss scale, or `reset` them.
        step: `continue` to count the steps, or `restart` at 0. The learning rate follows them.
    """

    path: str
    iteration: int | None = None
    data: str = "continue"
    optimizer: str = "keep"
    step: str = "continue"

    @staticmethod
    def of(mapping: Mapping[str, Any] | None) -> InitFrom | None:
        """From the configuration's mapping."""
        return None if mapping is None else InitFrom(**mapping)

    def first_step(self, manifest: Manifest) -> int:
        """The step at which the run starts."""
        return manifest.step if self.step == "continue" else 0

    def consumed(self, manifest: Manifest) -> int:
        """Samples of the run's order that are consumed before it."""
        return manifest.consumed if self.data == "continue" else 0

    def describe(self, manifest: Manifest) -> str:
        """What is inherited and what is not, in one line."""
        first = self.first_step(manifest)
        continued, kept = self.data == "continue", self.optimizer == "keep"
        parts = (
            "weights loaded",
            f"data continued after {manifest.consumed:,} samples" if continued else "data new, from sample 0",
            "optimizer kept (moments, update count, loss scale)" if kept else "optimizer new",
            f"steps and random states continued at step {first}" if first else "steps count from 0, random states new",
            f"learning-rate schedule of this config, at its step {first} (override_lr_scheduler is not needed)",
        )
        return "; ".join(parts)


def advise_new_run(path: Path, keys: Sequence[str], load: str | None) -> str:
    """How to start a new run from the checkpoint in `path`, as it is typed, for an error message.

    Args:
        keys: of `init_from` besides the path, as `data: restart`.
        load: this run's key, which may not be set with `init_from`.
    """
    without_load, init_from = ", load=null" if load else "", ", ".join([f"path: {path}", *keys])
    return f"start a new run from this checkpoint: another `save`{without_load}, and init_from={{{init_from}}}"


def check_init(
    init: InitFrom, manifest: Manifest, *, train_iters: int | None, use_checkpoint_lr_scheduler: bool
) -> None:
    """Refuse what the checkpoint does not hold, and a run without a step to take. Raises `UserError`."""
    if use_checkpoint_lr_scheduler:
        raise UserError(
            "init_from: the learning-rate schedule is this config's, but use_checkpoint_lr_scheduler: true asks for "
            "the checkpoint's; remove it (or use `load` instead of init_from, which keeps that schedule)"
        )
    if init.optimizer == "keep" and not manifest.optimizer:
        raise UserError(
            f"init_from: the checkpoint of step {manifest.step} in {init.path} was saved without optimizer state; "
            "set init_from.optimizer=reset"
        )
    first = init.first_step(manifest)
    if train_iters and train_iters <= first:
        raise UserError(
            f"train_iters: {train_iters} is not beyond step {first}, where the run starts: with init_from.step: "
            f"continue, steps are counted from the start of the earlier run. Set a larger train_iters, or "
            "init_from.step=restart"
        )
