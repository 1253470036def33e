"""Ends a run at a signal, with a checkpoint."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.callbacks import CALLBACKS
from megatron.errors import StopRequested
from megatron.log import get_logger
from megatron.signals import handle_stop_signals, name_signal
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

ACCELERATOR_STEPS = 10
# Ctrl-C under torchrun reaches a rank twice, from the terminal and from torchrun: a second one comes later.
SAME_SECONDS = 1.0


@CALLBACKS.register("stop_on_signal", phase="finish", loses="a signal ends the run at once, without a checkpoint")
class StopOnSignal(Callback):
    """Ctrl-C, SIGTERM, SIGUSR1, SIGHUP (the terminal is closed) or SIGQUIT on any rank ends the whole job after the
    current step, with a checkpoint (exit code 3); a second Ctrl-C ends it at once.

    A signal may reach one rank before another, so the ranks agree by one tiny reduction: after each step on a CPU,
    after every `ACCELERATOR_STEPS` on an accelerator, where reading its result makes the host wait.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._since = 0.0
        self._previous: dict[int, object] = {}

    def start(self, trainer: Trainer) -> None:
        self._previous = handle_stop_signals(self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is None:
            self._received, self._since = number, now
        elif number == signal.SIGINT and now - self._since > SAME_SECONDS:
            raise KeyboardInterrupt("ended at once by a second Ctrl-C")

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if trainer.state.device.type != "cpu" and trainer.step % ACCELERATOR_STEPS:
            return
        received = self._received or 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            flag = torch.tensor(received, device=trainer.state.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            received = int(flag)
        if received:
            name = name_signal(received)
            logger.info(f"{name}: saving and stopping after iteration {trainer.step}")
            trainer.request_stop(f"stopped by {name}", StopRequested.exit_code)

    def end(self, trainer: Trainer) -> None:
        self._restore()

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}
