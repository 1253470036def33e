"""How a run ends: announced to the next start, with everything saved or not, or by the watchdog."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from megatron.checkpoint.lock import SaveLock
from megatron.cluster.status import StatusFile, run_folder
from megatron.errors import DeepyError, LostRankError, StopRequested
from megatron.training.callback import Callback
from megatron.training.trainer import Trainer
from megatron.training.watchdog import Watchdog

if TYPE_CHECKING:
    from megatron.training.engine import StepOut


class AnnouncedEnd(Callback):
    """Notes in the lock that the job is about to end, so that a restart waits for its last checkpoint."""

    def __init__(self, lock: SaveLock) -> None:
        self.lock = lock

    def before_step(self, trainer: Trainer) -> None:
        if trainer.step + 1 == trainer.args.training.train_iters:
            self.lock.announce_end()  # already here: the last checkpoint is written in callbacks that come before

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if trainer.stop_reason is not None:
            self.lock.announce_end()


def watched(trainer: Trainer, store: dist.Store | None) -> contextlib.AbstractContextManager[object]:
    """Ends the job, saying so in `status.json`, when it makes no progress."""
    state, folder = trainer.state, run_folder(trainer.args)
    seconds, world_size = trainer.args.launcher.watchdog_seconds, state.topology.world_size
    if seconds <= 0 or (store is None and world_size > 1):
        return contextlib.nullcontext()

    def record(reason: str) -> None:
        file = StatusFile(folder) if folder is not None else None
        if file is not None and (status := file.read()) is not None:
            end = {"state": "failed", "exit_code": LostRankError.exit_code, "reason": reason}
            file.update(status, step=trainer.step, **end)

    return Watchdog(trainer.progress, seconds, state.rank, world_size, store, record)


def report_stop(trainer: Trainer) -> NoReturn:
    """Raise the error of a run that was asked to stop: `StopRequested` when everything is saved."""
    how = f"{trainer.stop_reason} at iteration {trainer.step}"
    if trainer.saved_step == trainer.step:
        raise StopRequested(f"{how} with everything saved; the same command resumes it")
    last = f"the last checkpoint is of iteration {trainer.saved_step}" if trainer.saved_step else "nothing is saved"
    raise DeepyError(f"{how}; {last}")
