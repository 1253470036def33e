"""Ends a run at a signal, with a checkpoint."""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.callbacks import CALLBACKS
from megatron.log import get_logger
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOP_BY_SIGNAL = "stopped by a signal"
ACCELERATOR_STEPS = 10


@CALLBACKS.register(
    "stop_on_signal", phase="finish", loses="SIGTERM and SIGUSR1 end the run at once, without a checkpoint"
)
class StopOnSignal(Callback):
    """SIGTERM or SIGUSR1 on any rank ends the whole job after the current step, with a checkpoint (exit code 3).

    A signal may reach one rank before another, so the ranks agree by one tiny reduction: after each step on a CPU,
    after every `ACCELERATOR_STEPS` on an accelerator, where reading its result makes the host wait.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, object] = {}

    def start(self, trainer: Trainer) -> None:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if trainer.state.device.type != "cpu" and trainer.step % ACCELERATOR_STEPS:
            return
        received = self._received or 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            flag = torch.tensor(received, device=trainer.state.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            received = int(flag)
        if received:
            logger.info(f"{signal.Signals(received).name}: saving and stopping after iteration {trainer.step}")
            trainer.request_stop(STOP_BY_SIGNAL)

    def end(self, trainer: Trainer) -> None:
        self._restore()

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}
