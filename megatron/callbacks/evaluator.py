"""Validation during training and the test loss at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from megatron.data.batch import StepBatch
from megatron.log import progress
from megatron.training.callback import Callback
from megatron.training.engine import StepOut
from megatron.training.trainer import Trainer

Batches = Callable[[int], Iterator[StepBatch]]


def evaluate(trainer: Trainer, batches: Iterator[StepBatch], iterations: int, what: str) -> dict[str, float]:
    """Mean loss per trained token over `iterations` global batches, and its perplexity. The same on every rank."""
    total, tokens = torch.zeros((), device=trainer.state.device), 0
    steps = range(iterations)
    for _ in progress(steps, what=what, unit="batch") if trainer.state.rank == 0 else steps:
        loss, count = trainer.engine.eval_batch(next(batches))
        total, tokens = total + loss, tokens + count
    mean = float(total) / tokens if tokens else math.nan
    return {"lm_loss": mean, "lm_loss_ppl": perplexity(mean)}


def perplexity(loss: float) -> float:
    """exp(loss), and infinity instead of an OverflowError where a double ends (loss above 709)."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class Evaluator(Callback):
    """Every `interval` steps runs `iterations` validation batches; at the end once more, and the test set.

    Validation k reads the samples [k * iterations * batch, (k + 1) * iterations * batch) of the validation
    order, as GPT-NeoX does, so that a resumed run validates on the same samples as an uninterrupted one.
    """

    def __init__(self, interval: int, iterations: int, valid: Batches | None, test: Batches | None) -> None:
        self.interval = interval
        self.iterations = iterations
        self.valid = valid
        self.test = test
        self._evaluated_at = -1

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if self.interval > 0 and trainer.step % self.interval == 0:
            self._validate(trainer)

    def _validate(self, trainer: Trainer) -> None:
        if self.valid is None or self.iterations <= 0 or self._evaluated_at == trainer.step:
            return
        self._evaluated_at = trainer.step
        # The k-th validation, counted from 0; the one at the end counts on from the last multiple of the interval.
        number = -(-trainer.step // self.interval) - 1 if self.interval > 0 else 0
        # What was loaded may be further than a run that only evaluates (train_iters 0) has samples for.
        number = min(number, (trainer.args.training.train_iters or 0) // max(1, self.interval))
        consumed = max(0, number) * self.iterations * trainer.args.training.train_batch_size
        metrics = evaluate(trainer, self.valid(consumed), self.iterations, "validation")
        trainer.call("evaluated", "validation", metrics)

    def end(self, trainer: Trainer) -> None:
        if trainer.step < (trainer.args.training.train_iters or 0):
            return  # stopped early: the run goes on later, and its last evaluation belongs to its last step
        self._validate(trainer)
        if self.test is not None and self.iterations > 0:
            trainer.call("evaluated", "test", evaluate(trainer, self.test(0), self.iterations, "test"))
