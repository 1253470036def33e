"""Adds up what the steps report and, every `log_interval` steps, logs it under stable names.

Losses stay on the device between logs. The values of a log come to the host in one copy, on an accelerator with the
next step, when they have long been computed and what the steps took is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.flops import Flops, step_flops
from megatron.training.callback import Callback, due
from megatron.training.late import LateNumbers

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.settled import Settled
    from megatron.training.trainer import Trainer


@dataclass
class Interval:
    """Sums since the last log."""

    grad_norm: Tensor  # of the last step that updated, 0-dim like the next two
    skipped: Tensor
    nan: Tensor
    steps: int = 0
    samples: int = 0
    flops: float = 0.0
    trained_tokens: int = 0
    padding: int = 0
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # sums over updates, and how many


@CALLBACKS.register(
    "meter", phase="log", idle={"log_interval": 0}, keys=("peak_theoretical_tflops",), loses="nothing is logged"
)
class Meter(Callback):
    """Every `log_interval` steps computes the metrics of a log: loss, learning rate, throughput and those of other
    callbacks.

    Args:
        interval: steps between logs; <= 0 switches logging off.
        flops: FLOPs of a step, for TFLOPS and MFU.
    """

    def __init__(self, interval: int, flops: Flops) -> None:
        self.interval = interval
        self.flops = flops
        self._initial: Tensor | None = None
        self._pending: tuple[list[str], LateNumbers, Interval, int] | None = None
        self._seconds = 0.0  # in steps, up to the last log: evaluation and saving do not count

    @classmethod
    def build(cls, context: RunContext) -> Meter:
        return cls(context.args.logging.log_interval, step_flops(context))

    def loaded(self, trainer: Trainer) -> None:
        # Of a run that went back: a log of steps that are trained again, and their time.
        self._pending, self._seconds = None, trainer.progress.seconds_in_steps
        self._reset(trainer)

    def _reset(self, trainer: Trainer) -> None:
        zero = torch.zeros((), device=trainer.state.device)
        self._sums = Interval(grad_norm=zero, skipped=zero, nan=zero)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        sums = self._sums
        if trainer.step == 1:
            self._initial = out.loss
        sums.steps += 1
        samples, length = trainer.plan.batch_size(trainer.step - 1), trainer.plan.seq_length(trainer.step - 1)
        sums.samples += samples
        sums.flops += self.flops.of_rows(length) * samples / (trainer.args.training.train_batch_size or 1)
        sums.trained_tokens += out.trained_tokens
        sums.padding += out.padding
        sums.skipped = sums.skipped + out.skipped
        # A step that forgets raises a loss of other data.
        losses = {} if trainer.plan.forgets(trainer.step - 1) else {"lm_loss": out.loss}
        for name, metric in {**losses, **out.metrics}.items():
            total, steps = sums.metrics.get(name, (torch.zeros_like(metric), torch.zeros_like(metric)))
            sums.metrics[name] = total + metric.masked_fill(out.skipped, 0.0), steps + ~out.skipped
        if out.grad_norm is not None:
            sums.nan = sums.nan + (out.skipped & out.grad_norm.isnan())
            sums.grad_norm = torch.where(out.skipped, sums.grad_norm, out.grad_norm)
        if due(trainer.step, self.interval):
            self._close(trainer, out)

    def _close(self, trainer: Trainer, out: StepOut) -> None:
        """End an interval."""
        sums = self._sums
        metrics: dict[str, float | Tensor] = {
            "train/learning_rate": trainer.lr,
            "train/grad_norm": sums.grad_norm,
            "train/skipped": sums.skipped,
            "train/nan": sums.nan,
            "train/tokens": float(trainer.consumed) * trainer.plan.tokens_per_sample,
            "train/trained_tokens": sums.trained_tokens,
        }
        for name, (total, steps) in sums.metrics.items():
            metrics[f"train/{name}"] = total / steps.clamp(min=1)
        if self._initial is not None:
            # Of a fresh model, near ln(vocabulary): the cheapest check that it is wired rightly. Reported once.
            metrics["loss/init"], self._initial = self._initial, None
        if out.loss_scale is not None:
            metrics["train/loss_scale"] = out.loss_scale
        metrics.update(trainer.plan.metrics(trainer.step - 1))
        metrics.update(trainer.metrics)
        trainer.metrics.clear()
        self._pending = (list(metrics), LateNumbers(list(metrics.values())), sums, trainer.step)
        if not trainer.late:
            self._flush(trainer)
        self._reset(trainer)

    def settled(self, trainer: Trainer, step: Settled) -> None:
        self._flush(trainer)

    def _flush(self, trainer: Trainer) -> None:
        """Log the interval that has ended: all its steps, and no later ones, are done."""
        if self._pending is None:
            return
        names, values, sums, step = self._pending
        self._pending = None
        seconds, self._seconds = trainer.progress.seconds_in_steps - self._seconds, trainer.progress.seconds_in_steps
        metrics = self._speed(trainer, sums, seconds) | dict(zip(names, values.read(), strict=True))
        trainer.call("logged", metrics, step)

    def _speed(self, trainer: Trainer, sums: Interval, seconds: float) -> dict[str, float]:
        """Throughput of an interval whose steps took so many seconds."""
        samples = sums.samples / seconds
        achieved = sums.flops / seconds / self.flops.world_size
        metrics = {
            "runtime/samples_per_sec": samples,
            "runtime/iteration_time": seconds / sums.steps,
            "runtime/steps_per_sec": sums.steps / seconds,
            "runtime/tokens_per_sec": samples * trainer.plan.tokens_per_sample - sums.padding / seconds,
            "runtime/flops_per_sec_per_gpu": achieved,
        }
        if self.flops.peak:
            metrics["runtime/model_flops_utilization"] = achieved / self.flops.peak
            metrics["runtime/hardware_flops_utilization"] = achieved * self.flops.recompute_factor / self.flops.peak
        return metrics

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._pending = None
