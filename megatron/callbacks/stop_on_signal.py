"""Ends a run at a signal or before its job's time limit, with a checkpoint."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.cluster.devices import end_of_job
from megatron.errors import StopRequested
from megatron.log import get_logger
from megatron.signals import STOP_SIGNALS, give_back, handle_stop_signals, name_signal
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.settled import Settled
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

# Ctrl-C under torchrun reaches a rank twice, from the terminal and from torchrun: a second one comes later.
SAME_SECONDS = 1.0
# Until the first checkpoint shows what one takes; and what is added to measured times.
FIRST_SAVE_SECONDS = 60.0
MARGIN, MARGIN_SECONDS = 1.25, 10.0


@CALLBACKS.register(
    "stop_on_signal",
    phase="finish",
    keys=("exit_duration_in_mins",),
    required_by=("exit_duration_in_mins",),
    loses="a signal ends the run at once, without a checkpoint",
)
class StopOnSignal(Callback):
    """Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2, SIGHUP (the terminal is closed) or SIGQUIT on any rank ends the job after
    the current step, with a checkpoint (exit code 3); a second Ctrl-C ends it at once.

    So do the time limit of a SLURM job (`SLURM_JOB_END_TIME`) and `exit_duration_in_mins`, as early as a stop takes by
    the times of this run. A signal may reach one rank before another, and a rank may be slower than others, so the
    ranks vote, in every step (`Trainer.voters`).

    Args:
        deadlines: name -> when the run has to be over, in seconds since the epoch; the same names on every rank.
    """

    def __init__(self, deadlines: Mapping[str, float] | None = None) -> None:
        self.deadlines = dict(deadlines or {})
        self._steps: deque[float] = deque(maxlen=20)
        self._received: int | None = None
        self._since = 0.0
        self._previous: dict[int, object] = {}
        self._voters: dict[str, Callable[[], bool]] = {}

    @classmethod
    def build(cls, context: RunContext) -> StopOnSignal:
        # Ranks may see other environments, but vote for the same names.
        deadlines = {"the job's time limit": end_of_job() or math.inf}
        minutes = context.args.training.exit_duration_in_mins or 0
        if minutes > 0:
            deadlines[f"exit_duration_in_mins {minutes:g}"] = psutil.Process().create_time() + 60 * minutes
        return cls(deadlines)

    def start(self, trainer: Trainer) -> None:
        self._voters = {name_signal(number): partial(self._has_received, number) for number in STOP_SIGNALS}
        for name, until in self.deadlines.items():
            self._voters[name] = partial(self._is_late, trainer, until)
        trainer.voters.update(self._voters)
        trainer.ends.update(self._voters)

    def loaded(self, trainer: Trainer) -> None:
        # Not before: while a checkpoint is loaded nothing is trained yet, and a signal ends the start at once.
        if not self._previous:  # else the run has gone back to a checkpoint
            self._previous = handle_stop_signals(self._remember)

    def _has_received(self, number: int) -> bool:
        return number == self._received

    def _is_late(self, trainer: Trainer, until: float) -> bool:
        """Whether the deadline is near. The first step does not count: it compiles."""
        if not self._steps:
            return False
        needed = trainer.progress.stop_seconds or self._seconds(trainer, FIRST_SAVE_SECONDS)
        return time.time() + MARGIN * needed + MARGIN_SECONDS > until

    def _seconds(self, trainer: Trainer, save: float) -> float:
        """What a stop takes at most: a request just after the vote of a step is voted for in the next one."""
        return 2 * max(self._steps) + trainer.progress.longest_pause + save

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is None:
            self._received, self._since = number, now
        elif number == signal.SIGINT and now - self._since > SAME_SECONDS:
            raise KeyboardInterrupt("ended at once by a second Ctrl-C")

    def settled(self, trainer: Trainer, step: Settled) -> None:
        if step.step > trainer.progress.first:
            self._steps.append(trainer.progress.step_seconds)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        progress = trainer.progress
        if progress.save_seconds is not None and self._steps:
            progress.stop_seconds = self._seconds(trainer, progress.save_seconds)
        reason = next((name for name in self._voters if name in trainer.voted), None)
        if reason is not None:
            logger.info(f"{reason}: saving and stopping after iteration {trainer.step}")
            trainer.request_stop(f"stopped by {reason}", StopRequested.exit_code)

    def end(self, trainer: Trainer) -> None:
        self._give_back(complete=True)

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._give_back(complete=False)

    def _give_back(self, *, complete: bool) -> None:
        give_back(self._previous, complete=complete)
        self._previous = {}
