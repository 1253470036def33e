"""Writes checkpoints when they are due, and deletes old ones once a new one is complete."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.checkpoint.cadence import is_save_step
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.retention import apply_retention
from megatron.checkpoint.save import save_checkpoint
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)


@CALLBACKS.register(
    "checkpointer",
    phase="save",
    idle={"save": None},
    keys=("checkpoint_factor", "extra_save_iters", "keep_last_n_checkpoints"),
    loses="no checkpoint is written, not even when the run stops",
)
class Checkpointer(Callback):
    """Saves to `save` at the steps of `checkpoint_factor` and `extra_save_iters`, at the end, and when stopping.

    Nothing is written while `trainer.save_blocked_by` is set, so that the last good checkpoint is not replaced.

    Args:
        root: the `save` folder.
        config_files: name -> text of the YAML files the run was started with.
    """

    def __init__(self, root: Path, config_files: dict[str, str]) -> None:
        self.root = root
        self.config_files = config_files

    @classmethod
    def build(cls, context: RunContext) -> Checkpointer:
        return cls(Path(context.args.checkpoint.save), config_texts(context.args))

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
        if trainer.save_blocked_by is not None:
            logger.warning(f"no checkpoint at iteration {trainer.step}: {trainer.save_blocked_by}")
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


def config_texts(args: NeoXArgs) -> dict[str, str]:
    """name -> text of the YAML files that the values came from, as far as they can be read from here."""
    files = {source.rsplit(":", 1)[0] for source in args.sources.values() if ":" in source}
    return {
        os.path.basename(path): Path(path).read_text(encoding="utf-8")
        for path in sorted(files)
        if path.endswith((".yml", ".yaml", ".json")) and os.path.isfile(path)
    }
