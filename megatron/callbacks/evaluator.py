"""Validation during training and the test loss at its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import Batches, NamedSet, RunContext
from megatron.data.batch import StepBatch
from megatron.log import progress
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer


def evaluate(trainer: Trainer, batches: Iterator[StepBatch], iterations: int, what: str) -> dict[str, float]:
    """Mean loss per trained token over `iterations` global batches, and its perplexity. The same on every rank."""
    return metrics_of(*sum_loss(trainer, batches, iterations, what))


def sum_loss(trainer: Trainer, batches: Iterator[StepBatch], iterations: int, what: str) -> tuple[float, int]:
    """Loss summed over the trained tokens of `iterations` global batches, and their number."""
    total, tokens = torch.zeros((), device=trainer.state.device), 0
    steps = range(iterations)
    for _ in progress(steps, what=what, unit="batch") if trainer.state.rank == 0 else steps:
        loss, count = trainer.engine.eval_batch(next(batches))
        total, tokens = total + loss, tokens + count
    return float(total), tokens


def metrics_of(total: float, tokens: int) -> dict[str, float]:
    """The metrics of a loss summed over some tokens."""
    mean = total / tokens if tokens else math.nan
    return {"lm_loss": mean, "lm_loss_ppl": perplexity(mean)}


def evaluate_sets(trainer: Trainer, sets: Sequence[NamedSet]) -> None:
    """Report every set as `validation/<name>`, and the sets of every tag together as `validation/<tag>`.

    A tag's `lm_loss` is per token over all its sets, as if they were one; `lm_loss_macro` is the mean of theirs.
    """
    found = {}
    for one in sets:
        found[one.name] = sum_loss(trainer, one.batches(0), one.iterations, one.name)
        trainer.call("evaluated", f"validation/{one.name}", metrics_of(*found[one.name]))
    for tag in dict.fromkeys(tag for one in sets for tag in one.tags):
        sums = [found[one.name] for one in sets if tag in one.tags]
        means = [metrics_of(*one)["lm_loss"] for one in sums]
        metrics = metrics_of(math.fsum(total for total, _ in sums), sum(tokens for _, tokens in sums))
        trainer.call("evaluated", f"validation/{tag}", metrics | {"lm_loss_macro": math.fsum(means) / len(means)})


def perplexity(loss: float) -> float:
    """exp(loss), and infinity instead of an OverflowError where a double ends (loss above 709)."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@CALLBACKS.register(
    "evaluator", phase="evaluate", idle={"eval_iters": 0}, keys=("eval_interval",), loses="nothing is evaluated"
)
class Evaluator(Callback):
    """Every `eval_interval` steps runs `eval_iters` validation batches; at the end once more, and the test set.

    Validation k reads the samples [k * eval_iters * batch, (k + 1) * eval_iters * batch) of the validation
    order, as GPT-NeoX does, so that a resumed run validates on the same samples as an uninterrupted one. Sets with
    names are evaluated along with it, each time on the same samples.
    """

    def __init__(
        self,
        interval: int,
        iterations: int,
        valid: Batches | None,
        test: Batches | None,
        sets: Sequence[NamedSet] = (),
    ) -> None:
        self.interval = interval
        self.iterations = iterations
        self.valid = valid
        self.test = test
        self.sets = sets
        self._evaluated_at = -1

    @classmethod
    def build(cls, context: RunContext) -> Evaluator:
        training, batches = context.args.training, context.batches
        return cls(training.eval_interval, training.eval_iters, batches.get("valid"), batches.get("test"), context.sets)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if due(trainer.step, self.interval):
            self._validate(trainer)

    def _validate(self, trainer: Trainer) -> None:
        if self.iterations <= 0 or self._evaluated_at == trainer.step:
            return
        self._evaluated_at = trainer.step
        with trainer.progress.during("evaluation"):
            if self.valid is not None:
                self._validate_on(self.valid, trainer)
            evaluate_sets(trainer, self.sets)

    def _validate_on(self, valid: Batches, trainer: Trainer) -> None:
        # The k-th validation, counted from 0; the one at the end counts on from the last multiple of the interval.
        number = -(-trainer.step // self.interval) - 1 if self.interval > 0 else 0
        # What was loaded may be further than a run that only evaluates (train_iters 0) has samples for.
        number = min(number, (trainer.args.training.train_iters or 0) // max(1, self.interval))
        consumed = max(0, number) * self.iterations * trainer.args.training.train_batch_size
        metrics = evaluate(trainer, valid(consumed), self.iterations, "validation")
        trainer.call("evaluated", "validation", metrics)

    def end(self, trainer: Trainer) -> None:
        if trainer.step < (trainer.args.training.train_iters or 0):
            return  # stopped early: the last evaluation belongs to the last step of the resumed run
        self._validate(trainer)
        if self.test is not None and self.iterations > 0:
            with trainer.progress.during("evaluation"):
                trainer.call("evaluated", "test", evaluate(trainer, self.test(0), self.iterations, "test"))
