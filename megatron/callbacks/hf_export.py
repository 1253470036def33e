"""Hugging Face copies of a run's checkpoints while it trains."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.checkpoint.agreement import await_thread
from megatron.cluster.exports import Exports, last_words
from megatron.convert.families import choose_family
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

NAME = "hf_export"


def exports_of(args: NeoXArgs) -> Exports:
    """Those of a run."""
    options, root = args.checkpoint, Path(args.checkpoint.save or "")
    averaged = args.optimizer.ema_decay is not None and not options.no_save_optim
    return Exports(root.resolve(), Path(options.hf_save_path or root / "hf").resolve(), averaged)


@CALLBACKS.register(
    "hf_export",
    phase="report",
    idle={"hf_save_interval": 0},
    keys=("hf_save_path",),
    loses="no checkpoint is exported to a Hugging Face folder (hf_save_interval)",
)
class HfExport(Callback):
    """Exports complete checkpoints, `every` steps or more apart, and the last one of a finished run.

    A process beside the run converts and checks them (rank 0 starts it), one at a time: no step waits. While one is
    under way the newest of the later ones waits for it. What is waited for is not deleted. An export that fails is a
    warning and ends no run; one that was killed with the run is made by the next start.

    Args:
        exports: on rank 0; None on the ranks that only wait at the end.
    """

    def __init__(self, exports: Exports | None, every: int) -> None:
        self.exports, self.every = exports, every
        self._process: subprocess.Popen[bytes] | None = None
        self._step = -1  # that of the process
        self._next: int | None = None
        self._newest = -1  # of those that were begun, and of earlier starts
        self._began = 0.0

    @classmethod
    def build(cls, context: RunContext) -> HfExport:
        """Raises `UserError` naming what no architecture of transformers can express."""
        try:  # better known now than after the first checkpoint
            choose_family(context.args.model, None)
        except UserError as error:
            raise UserError(f"hf_save_interval: {error}") from error
        exports = exports_of(context.args)
        return cls(exports if context.state.rank == 0 else None, context.args.checkpoint.hf_save_interval)

    def loaded(self, trainer: Trainer) -> None:
        if self.exports is not None and trainer.saved_step is not None:
            # A run that went back replaces its later checkpoints.
            self._newest = max((step for step in self.exports.steps() if step <= trainer.saved_step), default=-1)
            self._want(trainer, trainer.saved_step)

    def saved(self, trainer: Trainer, path: str) -> None:
        if trainer.saved_step is not None:  # steps ago, where saves are asynchronous
            self._want(trainer, trainer.saved_step)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._close(trainer)

    def end(self, trainer: Trainer) -> None:
        """A finished run waits for its last export; one that stops goes at once, and the next start exports."""
        if trainer.step < (trainer.args.training.train_iters or 0):
            self._kill()
            return
        if self.exports is not None and trainer.saved_step == trainer.step:
            self._want(trainer, trainer.step, last=True)
        thread = None
        if self.exports is not None:
            thread = threading.Thread(target=self._finish, args=(trainer,), name=NAME, daemon=True)
            thread.start()
        for _ in await_thread(thread, trainer.state):
            trainer.progress.beat()

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._kill()

    def _want(self, trainer: Trainer, step: int, last: bool = False) -> None:
        """Export a checkpoint, unless it is too near to the one before."""
        if self.exports is None or self._newest >= step:
            return
        if last or self._newest < 0 or step - self._newest >= self.every:
            self._newest = self._next = step
            self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        """Start what waits, unless another is under way."""
        if self._process is None and self._next is not None and self.exports is not None:
            self._step, self._next, self._began = self._next, None, time.monotonic()
            try:
                self._process = self.exports.start(self._step)
            except OSError as error:
                logger.warning(f"the checkpoint of iteration {self._step} is not exported: {error}")
        waiting = {self._step} if self._process is not None else set()
        trainer.held_checkpoints[NAME] = waiting | ({self._next} if self._next is not None else set())

    def _close(self, trainer: Trainer) -> None:
        """Report the process, which has ended, and start what waits."""
        assert self._process is not None and self.exports is not None
        if self._process.returncode == 0:
            seconds = time.monotonic() - self._began
            where = self.exports.of(self._step)
            logger.info(f"exported the checkpoint of iteration {self._step} to {where}: {seconds:.0f} s")
        else:
            why = f"{last_words(self.exports.log)} (exit code {self._process.returncode}, see {self.exports.log})"
            logger.warning(f"the checkpoint of iteration {self._step} is not exported: {why}")
        self._process = None
        self._begin(trainer)

    def _finish(self, trainer: Trainer) -> None:
        while (process := self._process) is not None:
            process.wait()
            self._close(trainer)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
