"""Adds up what the steps report and, every `log_interval` steps, logs it under stable names.

Losses stay on the device between logs, and on an accelerator the values of a log are read one step later, when they
have long been computed. (The engine itself still waits once a step, to learn whether the gradient is finite.)
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.flops import Flops, step_flops
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer


@dataclass
class Interval:
    """Sums since the last log."""

    loss: Tensor  # over steps that updated, 0-dim
    grad_norm: Tensor
    seconds: float = 0.0  # inside steps: evaluation and saving do not count
    updated: int = 0
    steps: int = 0
    skipped: int = 0
    nan: int = 0
    trained_tokens: int = 0
    padding: int = 0


@CALLBACKS.register(
    "meter", phase="log", idle={"log_interval": 0}, keys=("peak_theoretical_tflops",), loses="nothing is logged"
)
class Meter(Callback):
    """Every `log_interval` steps computes the metrics of a log: loss, learning rate, throughput and those of other
    callbacks.

    Args:
        interval: steps between logs; <= 0 switches logging off.
        flops: FLOPs of a step, for TFLOPS and MFU.

    Attributes:
        late: values are read with the next step, when an accelerator has long computed them.
    """

    def __init__(self, interval: int, flops: Flops) -> None:
        self.interval = interval
        self.flops = flops
        self._initial: Tensor | None = None
        self.late = False
        self._pending: tuple[dict[str, float | Tensor], int] | None = None

    @classmethod
    def build(cls, context: RunContext) -> Meter:
        return cls(context.args.logging.log_interval, step_flops(context))

    def loaded(self, trainer: Trainer) -> None:
        self.late = trainer.state.device.type != "cpu"
        self._reset(trainer)

    def _reset(self, trainer: Trainer) -> None:
        zero = torch.zeros((), device=trainer.state.device)
        self._sums = Interval(loss=zero, grad_norm=zero.clone())

    def before_step(self, trainer: Trainer) -> None:
        self._since = time.perf_counter()

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        self._flush(trainer)
        sums = self._sums
        sums.seconds += time.perf_counter() - self._since
        if trainer.step == 1:
            self._initial = out.loss
        sums.steps += 1
        sums.trained_tokens += out.trained_tokens
        sums.padding += out.padding
        if out.skipped:
            sums.skipped += 1
            sums.nan += out.grad_norm is not None and bool(out.grad_norm.isnan())
        else:
            sums.updated += 1
            sums.loss = sums.loss + out.loss
            if out.grad_norm is not None:
                sums.grad_norm = out.grad_norm
        if due(trainer.step, self.interval):
            self._close(trainer, out)

    def _close(self, trainer: Trainer, out: StepOut) -> None:
        """End an interval. Values are read now on a CPU, and with the next step on an accelerator."""
        sums, seconds = self._sums, self._sums.seconds / self._sums.steps
        training = trainer.args.training
        samples = training.train_batch_size / seconds
        achieved = self.flops.per_step / seconds / self.flops.world_size
        metrics: dict[str, float | Tensor] = {
            "train/learning_rate": trainer.lr,
            "train/lm_loss": sums.loss / max(1, sums.updated),
            "train/grad_norm": sums.grad_norm,
            "train/skipped": sums.skipped,
            "train/nan": sums.nan,
            "train/tokens": float(trainer.consumed) * trainer.args.model.seq_length,
            "train/trained_tokens": sums.trained_tokens,
            "runtime/samples_per_sec": samples,
            "runtime/iteration_time": seconds,
            "runtime/steps_per_sec": 1 / seconds,
            "runtime/tokens_per_sec": samples * trainer.args.model.seq_length - sums.padding / sums.seconds,
            "runtime/flops_per_sec_per_gpu": achieved,
        }
        if self.flops.peak:
            metrics["runtime/model_flops_utilization"] = achieved / self.flops.peak
            metrics["runtime/hardware_flops_utilization"] = achieved * self.flops.recompute_factor / self.flops.peak
        if self._initial is not None:
            # Of a fresh model, near ln(vocabulary): the cheapest check that it is wired rightly. Reported once.
            metrics["loss/init"], self._initial = self._initial, None
        if out.loss_scale is not None:
            metrics["train/loss_scale"] = out.loss_scale
        metrics.update(trainer.metrics)
        trainer.metrics.clear()
        self._pending = (metrics, trainer.step)
        if not self.late:
            self._flush(trainer)
        self._reset(trainer)

    def _flush(self, trainer: Trainer) -> None:
        if self._pending is None:
            return
        metrics, step = self._pending
        self._pending = None
        trainer.call("logged", {name: float(value) for name, value in metrics.items()}, step)

    def end(self, trainer: Trainer) -> None:
        self._flush(trainer)

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._pending = None
