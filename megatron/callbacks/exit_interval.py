"""Ends a run before `train_iters`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer


@CALLBACKS.register("exit_interval", phase="check", idle={"exit_interval": 0})
class ExitInterval(Callback):
    """Ends the run, with exit code 0, when the step divides by `exit_interval` (a key of GPT-NeoX)."""

    def __init__(self, interval: int | None) -> None:
        self.interval = interval

    @classmethod
    def build(cls, context: RunContext) -> ExitInterval:
        return cls(context.args.training.exit_interval)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if due(trainer.step, self.interval):
            trainer.request_stop(f"exit_interval {self.interval}")
