"""Ends a run at a signal or before its job's time limit, with a checkpoint."""

from __future__ import annotations

import signal
import time
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.cluster.devices import end_of_job
from megatron.errors import StopRequested
from megatron.log import get_logger
from megatron.signals import STOP_SIGNALS, give_back, handle_stop_signals, name_signal
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

# Ctrl-C under torchrun reaches a rank twice, from the terminal and from torchrun: a second one comes later.
SAME_SECONDS = 1.0
# Until the first checkpoint shows what one takes; and what is added to measured times.
FIRST_SAVE_SECONDS = 60.0
MARGIN, MARGIN_SECONDS = 1.25, 10.0


@CALLBACKS.register("stop_on_signal", phase="finish", loses="a signal ends the run at once, without a checkpoint")
class StopOnSignal(Callback):
    """Ctrl-C, SIGTERM, SIGUSR1, SIGHUP (the terminal is closed) or SIGQUIT on any rank ends the whole job after the
    current step, with a checkpoint (exit code 3); a second Ctrl-C ends it at once.

    So does the time limit of a SLURM job (`SLURM_JOB_END_TIME`), as early as a stop takes by the times of this run. A
    signal may reach one rank before another, so the ranks vote, in every step (`Engine.votes`).
    """

    def __init__(self, until: float | None = None) -> None:
        self.until = until
        self._steps: deque[float] = deque(maxlen=20)
        self._received: int | None = None
        self._since = 0.0
        self._previous: dict[int, object] = {}

    @classmethod
    def build(cls, context: RunContext) -> StopOnSignal:
        return cls(end_of_job())

    def start(self, trainer: Trainer) -> None:
        self._previous = handle_stop_signals(self._remember)
        trainer.engine.votes = lambda: [*(number == self._received for number in STOP_SIGNALS), self._is_late(trainer)]

    def _is_late(self, trainer: Trainer) -> bool:
        """Whether the job's time limit is near. The first step does not count: it compiles."""
        if self.until is None or not self._steps:
            return False
        needed = trainer.progress.stop_seconds or self._seconds(trainer, FIRST_SAVE_SECONDS)
        return time.time() + MARGIN * needed + MARGIN_SECONDS > self.until

    def _seconds(self, trainer: Trainer, save: float) -> float:
        """What a stop takes at most: a request just after the vote of a step is voted for in the next one."""
        return 2 * max(self._steps) + trainer.progress.longest_pause + save

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is None:
            self._received, self._since = number, now
        elif number == signal.SIGINT and now - self._since > SAME_SECONDS:
            raise KeyboardInterrupt("ended at once by a second Ctrl-C")

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        progress = trainer.progress
        if trainer.step > progress.first:
            self._steps.append(progress.step_seconds)
        if progress.save_seconds is not None and self._steps:
            progress.stop_seconds = self._seconds(trainer, progress.save_seconds)
        names = [*(name_signal(number) for number in STOP_SIGNALS), "the job's time limit"]
        for name in (name for name, voted in zip(names, out.votes) if voted):
            logger.info(f"{name}: saving and stopping after iteration {trainer.step}")
            trainer.request_stop(f"stopped by {name}", StopRequested.exit_code)
            return

    def end(self, trainer: Trainer) -> None:
        self._give_back(complete=True)

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._give_back(complete=False)

    def _give_back(self, *, complete: bool) -> None:
        give_back(self._previous, complete=complete)
        self._previous = {}
