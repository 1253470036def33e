"""One line at the bottom of a terminal that says how the run is doing, and a bar below it for what else takes long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.flops import Flops, step_flops
from megatron.checkpoint.rewinds import Rewinding
from megatron.log import ProgressBar, on_terminal
from megatron.neox_arguments.callback_key import choose_callbacks
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.settled import Settled
    from megatron.training.trainer import Trainer

_STYLE = "{n_fmt}/{total_fmt} {percentage:.0f}%{postfix}, ETA {remaining}, elapsed {elapsed}"
_MEMORY = 0.9  # of the mean of the seconds of a step: it is that of the last ten or so


def shows_live_line(context: RunContext) -> bool:
    """Whether this rank has the line: on a terminal, unless it is switched off."""
    wanted = any(one.name == "live_line" for one in choose_callbacks(context.args))
    return wanted and context.state.rank == 0 and on_terminal()


@CALLBACKS.register("live_line", phase="report")
class LiveLine(Callback):
    """On a terminal: step of steps, share, loss, learning rate, tokens/s, MFU where the device is known, elapsed and
    left. It stands for the training lines, which go on in log files and wherever the output is no terminal.

    Nothing waits for it: the loss is that of the newest step that is known on the host.
    """

    def __init__(self, flops: Flops) -> None:
        self.flops = flops
        self._bar: ProgressBar | None = None
        self._saving: ProgressBar | None = None
        self._beats = 0  # signs of progress of this checkpoint
        self._last_beats: int | None = None  # and of the one before
        self._loss: float | None = None
        self._seconds: float | None = None
        self._consumed = self._samples = 0

    @classmethod
    def build(cls, context: RunContext) -> LiveLine | None:
        return cls(step_flops(context)) if shows_live_line(context) else None

    def loaded(self, trainer: Trainer) -> None:
        self._consumed, total = trainer.consumed, trainer.args.training.train_iters or 0
        self._close(Rewinding)  # the run has gone back to a checkpoint: its line begins anew
        if trainer.step >= total:
            return
        # The rates are asked for when the line is drawn.
        text = lambda _: self._text(trainer)  # noqa: E731
        self._bar = ProgressBar("training", total, "step", before=trainer.step, rates=text, style=_STYLE)
        trainer.progress.listeners.append(lambda: self._beat(trainer))

    def settled(self, trainer: Trainer, step: Settled) -> None:
        if not trainer.plan.forgets(step.step - 1):
            self._loss = step.loss

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        last = trainer.progress.step_seconds
        if last > 0:
            self._seconds = last if self._seconds is None else _MEMORY * self._seconds + (1 - _MEMORY) * last
        self._samples, self._consumed = trainer.consumed - self._consumed, trainer.consumed
        if self._bar is not None:
            self._bar.reach(trainer.step)

    def _text(self, trainer: Trainer) -> str:
        parts = [] if self._loss is None else [f"loss {self._loss:.4f}"]
        parts.append(f"lr {trainer.lr:.2e}")
        if self._seconds:
            speed = self._samples * trainer.plan.tokens_per_sample / self._seconds
            parts.append(f"{speed:,.0f} tokens/s" if speed < 1e5 else f"{speed / 1e3:,.0f}k tokens/s")
            if self.flops.peak:
                used = self.flops.per_step / self._seconds / self.flops.world_size / self.flops.peak
                parts.append(f"MFU {used:.1%}")
        if trainer.progress.activity != "training":
            parts.append(trainer.progress.activity)
        return ", ".join(parts)

    def _beat(self, trainer: Trainer) -> None:
        """A sign of progress: it is time to draw the line again; a checkpoint has as many as the one before."""
        if self._bar is not None:
            self._bar.reach(trainer.step)
        if trainer.progress.activity == "checkpoint":
            if self._saving is None:
                self._saving = ProgressBar("checkpoint", self._last_beats, "part")
            self._beats += 1
            self._saving.reach(self._beats)
        elif self._saving is not None:
            self._saving.__exit__(None)
            self._saving, self._last_beats, self._beats = None, self._beats, 0

    def end(self, trainer: Trainer) -> None:
        self._close(None)

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._close(type(error))

    def _close(self, failure: type[BaseException] | None) -> None:
        for bar in (self._saving, self._bar):
            if bar is not None:
                bar.__exit__(failure)
        self._bar = self._saving = None
