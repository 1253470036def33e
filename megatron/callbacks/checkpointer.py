"""Writes checkpoints when they are due, and deletes old ones once a new one is complete."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.checkpoint import layout
from megatron.checkpoint.agreement import gather
from megatron.checkpoint.cadence import is_save_step
from megatron.checkpoint.find import list_checkpoints
from megatron.checkpoint.folder import write_latest
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.retention import apply_retention
from megatron.checkpoint.save import save_checkpoint
from megatron.errors import DeepyError, NumericsError
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

# A loss beyond this many times that of the first step says that the weights are ruined: an untrained model is better.
ABSURD = 10.0


@CALLBACKS.register(
    "checkpointer",
    phase="save",
    idle={"save": None},
    keys=("checkpoint_factor", "extra_save_iters", "keep_last_n_checkpoints"),
    loses="no checkpoint is written, not even when the run stops",
)
class Checkpointer(Callback):
    """Saves to `save` at the steps of `checkpoint_factor` and `extra_save_iters`, at the end, and when stopping.

    A skipped update leaves the weights as they were, so it is no reason not to save. Weights that are not finite end
    the run instead of being saved (exit code 4).

    A checkpoint is *good* once its weights have taken a step whose loss and gradient were finite, and whose loss was
    not absurd: the update that made them did not ruin them. The newest good one is never deleted, and is what `latest`
    names again when bad numbers end the run.

    Args:
        root: the `save` folder.
        config_files: name -> text of the YAML files the run was started with.

    Attributes:
        good: step of the newest good checkpoint; None when there is none.
        first_loss: loss of the first step, the measure of what is absurd.
    """

    def __init__(self, root: Path, config_files: dict[str, str]) -> None:
        self.root = root
        self.config_files = config_files
        self.good: int | None = None
        self.first_loss: float | None = None
        self._ruined: int | None = None
        self._last: StepOut | None = None

    @classmethod
    def build(cls, context: RunContext) -> Checkpointer:
        return cls(Path(context.args.checkpoint.save), config_texts(context.args))

    def loaded(self, trainer: Trainer) -> None:
        if trainer.step > 0:
            trainer.saved_step = trainer.step  # it was read from a checkpoint; the same one is not written again
        elif 0 in (trainer.args.checkpoint.extra_save_iters or ()):
            self.save(trainer)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        self._last = out
        if not out.skipped:
            self._judge(trainer, out)
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
        if trainer.step == 0:
            return
        self.save(trainer)
        if trainer.saved_step != trainer.step:
            raise DeepyError(
                f"the run ends at iteration {trainer.step} without its checkpoint: {trainer.save_blocked_by}; "
                f"{_newest(trainer)}"
            )
        if trainer.stop_reason is None and self._last is not None and not self._last.skipped and self._sane(self._last):
            self.good = trainer.step  # as far as it can be known: no step follows
            self._delete_old(trainer)

    def error(self, trainer: Trainer, error: BaseException) -> None:
        if trainer.state.rank != 0 or not isinstance(error, NumericsError) or self.good in (None, trainer.saved_step):
            return
        if self.good in list_checkpoints(self.root).steps:
            write_latest(self.root, self.good)
            logger.warning(
                f"{self.root}/latest names the checkpoint of iteration {self.good} again, so the run resumes there: "
                "no good step followed the newer ones"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"good": self.good, "first_loss": self.first_loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.good, self.first_loss = state["good"], state["first_loss"]

    def _judge(self, trainer: Trainer, out: StepOut) -> None:
        """A step was taken with the weights of the newest checkpoint: whether it shows that they are good.

        Reads the loss once per checkpoint: on an accelerator that waits for the step.
        """
        newest = trainer.saved_step
        if self.first_loss is None:
            self.first_loss = float(out.loss)
        if newest in (None, self.good, self._ruined):
            return
        if self._sane(out):
            self.good = newest
            self._delete_old(trainer)
            return
        self._ruined = newest
        if trainer.state.rank == 0:
            kept = "" if self.good is None else f"; that of iteration {self.good} is kept"
            logger.warning(
                f"the loss of iteration {trainer.step} is {float(out.loss):g}, more than {ABSURD:g} times that of the "
                f"first step ({self.first_loss:g}): the checkpoint of iteration {newest} holds ruined weights{kept}"
            )

    def _sane(self, out: StepOut) -> bool:
        return self.first_loss is None or float(out.loss) <= ABSURD * max(abs(self.first_loss), 1.0)  # not so if NaN

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint of this step, unless it exists or a callback forbids it. Collective over all ranks.

        Raises `NumericsError` when the weights are not finite.
        """
        if trainer.saved_step == trainer.step:
            return
        if trainer.save_blocked_by is not None:
            logger.warning(f"no checkpoint at iteration {trainer.step}: {trainer.save_blocked_by}")
            return
        check_weights(trainer)
        options, started = trainer.args.checkpoint, time.monotonic()
        with trainer.progress.during("checkpoint"):
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
        trainer.saved_step, trainer.progress.save_seconds = trainer.step, time.monotonic() - started
        trainer.call("saved", str(path))
        self._delete_old(trainer)

    def _delete_old(self, trainer: Trainer) -> None:
        options = trainer.args.checkpoint
        if trainer.state.rank == 0:
            kept = {*(options.extra_save_iters or ()), *trainer.held_checkpoints}
            for step in apply_retention(self.root, options.keep_last_n_checkpoints, kept, self.good):
                logger.info(f"deleted the checkpoint of iteration {step} (keep_last_n_checkpoints)")


def check_weights(trainer: Trainer) -> None:
    """Raise `NumericsError` on every rank when a weight of the model is not finite. Collective over all ranks."""
    names = sorted({name for found in gather(trainer.engine.not_finite(), trainer.state) for name in found})
    if names:
        raise NumericsError(
            f"weights of {len(names)} parameters are not finite at iteration {trainer.step}, the first of {names[0]}; "
            f"they are not saved, and {_newest(trainer)}"
        )


def _newest(trainer: Trainer) -> str:
    newest = trainer.saved_step
    return "nothing is saved" if newest is None else f"the newest checkpoint is of iteration {newest}"


def config_texts(args: NeoXArgs) -> dict[str, str]:
    """name -> text of the YAML files that the values came from, as far as they can be read from here."""
    files = {source.rsplit(":", 1)[0] for source in args.sources.values() if ":" in source}
    found: dict[str, str] = {}
    for path in sorted(files):
        if path.endswith((".yml", ".yaml", ".json")) and os.path.isfile(path):
            found[_free_name(path, {layout.RESOLVED, *found})] = Path(path).read_text(encoding="utf-8")
    return found


def _free_name(path: str, taken: set[str]) -> str:
    """A file's name, with as many of its folders in front as nobody else has: `b-run.yml` after `a/run.yml`."""
    parts = Path(path).absolute().parts[1:]
    names = ("-".join(parts[-depth:]) for depth in range(1, len(parts) + 1))
    return next((name for name in names if name not in taken), f"{len(taken)}-{parts[-1]}")
