"""Writes checkpoints when they are due, and deletes old ones once a new one is complete."""

from __future__ import annotations

from pathlib import Path

from megatron.callbacks.health import SkippedSteps
from megatron.checkpoint.cadence import is_save_step
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.retention import apply_retention
from megatron.checkpoint.save import save_checkpoint
from megatron.log import get_logger
from megatron.training.callback import Callback
from megatron.training.engine import StepOut
from megatron.training.trainer import Trainer

logger = get_logger(__name__)


class Checkpointer(Callback):
    """Saves to `root` at the steps of `checkpoint_factor` and `extra_save_iters`, at the end, and when stopping.

    During a streak of skipped updates nothing is written, so that the last good checkpoint is not replaced.

    Args:
        root: the `save` folder.
        config_files: name -> text of the YAML files the run was started with.
        health: tells whether the last updates were skipped.
    """

    def __init__(self, root: Path, config_files: dict[str, str], health: SkippedSteps) -> None:
        self.root = root
        self.config_files = config_files
        self.health = health

    def loaded(self, trainer: Trainer) -> None:
        if trainer.step > 0:
            trainer.saved_step = trainer.step  # it was read from a checkpoint; the same one is not written again
        elif 0 in (trainer.args.checkpoint.extra_save_iters or ()):
            self.save(trainer)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        options = trainer.args.checkpoint
        due = is_save_step(
            trainer.step,
            scale=options.checkpoint_scale,
            factor=options.checkpoint_factor,
            extra=options.extra_save_iters,
        )
        if due:
            self.save(trainer)

    def end(self, trainer: Trainer) -> None:
        if trainer.step > 0:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint of this step, unless it exists or the numbers are bad. Collective over all ranks."""
        if trainer.saved_step == trainer.step:
            return
        if self.health.streak > 0:
            logger.warning(
                f"no checkpoint at iteration {trainer.step}: the last {self.health.streak} updates were skipped"
            )
            return
        options = trainer.args.checkpoint
        path = save_checkpoint(
            self.root,
            trainer.step,
            trainer.engine,
            trainer.state,
            heads=Heads.of(trainer.args.model),
            consumed=trainer.consumed,
            client=trainer.state_dict(),
            config=trainer.args.to_dict(),
            config_files=self.config_files,
            save_optim=not options.no_save_optim,
            save_rng=not options.no_save_rng,
        )
        trainer.saved_step = trainer.step
        trainer.call("saved", str(path))
        if trainer.state.rank == 0:
            for step in apply_retention(self.root, options.keep_last_n_checkpoints, options.extra_save_iters):
                logger.info(f"deleted the checkpoint of iteration {step} (keep_last_n_checkpoints)")
