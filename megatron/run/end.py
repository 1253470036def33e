"""How a run ends: announced to the next start, with everything saved or not, or by the watchdog."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from megatron.checkpoint.agreement import meet
from megatron.checkpoint.lock import SaveLock
from megatron.cluster.status import StatusFile, run_folder
from megatron.errors import DeepyError, LostRankError, StopRequested
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.signals import lose_at_stop
from megatron.training import flight_recorder
from megatron.training.callback import Callback
from megatron.training.progress import PHASES, Progress
from megatron.training.time_limits import TimeLimits, limit_device
from megatron.training.trainer import Trainer
from megatron.training.watchdog import Watchdog

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.settled import Settled


class Begins(Callback):
    """From the loop's begin on, a signal for which nobody saves loses steps. Has to come after all that handle them."""

    def loaded(self, trainer: Trainer) -> None:
        lose_at_stop()


class AnnouncedEnd(Callback):
    """Notes in the lock that the job is about to end, so that a restart waits for its last checkpoint."""

    def __init__(self, lock: SaveLock) -> None:
        self.lock = lock

    def loaded(self, trainer: Trainer) -> None:
        self.lock.announce_end(False)  # a run that has gone back from its last step trains on

    def before_step(self, trainer: Trainer) -> None:
        if trainer.step + 1 == trainer.args.training.train_iters:
            self.lock.announce_end()  # already here: the last checkpoint is written in callbacks that come before

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if trainer.stop_reason is not None:
            self.lock.announce_end()


class StepLimits(Callback):
    """Once the first steps are done, a hung collective operation of the device ends the run early.

    For what they made one rank do after an evaluation or a checkpoint the others wait on the
    host, and not in the first collective operation of the next step.
    """

    def __init__(self, limits: TimeLimits) -> None:
        self.limits, self.longest, self.set, self.pauses = limits, 0.0, 0.0, 0

    def settled(self, trainer: Trainer, step: Settled) -> None:
        if step.step > trainer.progress.first + 1:
            self.longest = max(self.longest, trainer.progress.step_seconds)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        progress = trainer.progress
        if progress.pauses != self.pauses:
            self.pauses = progress.pauses
            meet(trainer.state)
        if progress.step < progress.first + 1:  # it compiles
            return
        if self.limits.device(self.longest) > self.set:
            self.set = self.limits.device(1.5 * self.longest)  # not anew at every step that is a little longer
            limit_device(trainer.state, self.set)


def watched(
    args: NeoXArgs, state: ParallelState, store: dist.Store | None, progress: Progress
) -> contextlib.AbstractContextManager[object]:
    """Ends the job, saying so in `status.json`, when it makes no progress; until its first step it only says who is
    awaited."""
    seconds, world_size, folder = args.launcher.watchdog_seconds, state.topology.world_size, run_folder(args)
    if seconds <= 0 or (store is None and world_size > 1):
        return contextlib.nullcontext()

    def record(reason: str) -> None:
        file = StatusFile(folder) if folder is not None else None
        if file is not None and (status := file.read()) is not None:
            end = {"state": "failed", "exit_code": LostRankError.exit_code, "reason": reason}
            file.update(status, step=max(0, progress.step - (progress.phase != PHASES[-1])), **end)

    trace = None
    # Of gloo's operations torch keeps no groups, without which nothing reads the file.
    if folder is not None and dist.is_initialized() and dist.get_backend() == "nccl":
        trace = Path(f"{flight_recorder.prefix_of(folder)}{state.rank}")
    return Watchdog(progress, seconds, state.rank, world_size, store, record, doing=state.doing, trace=trace)


def report_stop(trainer: Trainer) -> NoReturn:
    """Raise the error of a run that was asked to stop: `StopRequested` when everything is saved."""
    how = f"{trainer.stop_reason} at iteration {trainer.step}"
    if trainer.saved_step == trainer.step:
        raise StopRequested(f"{how} with everything saved; the same command resumes it")
    last = f"the last checkpoint is of iteration {trainer.saved_step}" if trainer.saved_step else "nothing is saved"
    raise DeepyError(f"{how}; {last}")
