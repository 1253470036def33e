"""Validation during training and the test loss at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import Batches, NamedSet, RunContext
from megatron.checkpoint.rng import random_state, restore_random_state
from megatron.data.batch import StepBatch
from megatron.log import progress
from megatron.objectives import Objective
from megatron.tokenizer import Tokenizer
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    import numpy as np

    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer


@dataclass(frozen=True)
class Sums:
    """What was added up over some batches: the loss (nats, where it is per token) and each metric of the objective,
    what they are means over, and the bytes of text that the trained tokens stand for (None when that is not known)."""

    objective: Objective
    sums: tuple[float, ...]
    counts: tuple[float, ...]
    bytes: int | None = None

    def __add__(self, other: Sums) -> Sums:
        both = None if self.bytes is None or other.bytes is None else self.bytes + other.bytes
        return Sums(self.objective, _added(self.sums, other.sums), _added(self.counts, other.counts), both)

    @property
    def metrics(self) -> dict[str, float]:
        """The mean loss (NaN where it is over nothing), its perplexity and the loss in bits per byte where it is per
        token, and those of the objective's metrics that are over something."""
        mean, *metrics = (total / n if n else math.nan for total, n in zip(self.sums, self.counts, strict=True))
        found = {"lm_loss": mean}
        if self.objective.counts[0] == "tokens":
            found["lm_loss_ppl"] = perplexity(mean)
            if self.bytes:
                found["bits_per_byte"] = self.sums[0] / math.log(2) / self.bytes
        means = zip(self.objective.metrics, metrics, self.counts[1:], strict=True)
        return found | {name: metric for name, metric, n in means if n}


def _added(some: tuple[float, ...], others: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(add, some, others))


def add_up(trainer: Trainer, batches: Iterator[StepBatch], iterations: int, what: str, sizes: Tensor | None) -> Sums:
    """The sums over `iterations` global batches; the same on every rank.

    Args:
        sizes: bytes of text that each token stands for, int64 `[v]` on the device; None: not known.
    """
    state, objective = trainer.state, trainer.engine.objective
    total = torch.zeros(1 + len(objective.metrics), device=state.device)
    counts = (0.0,) * len(total)
    read = torch.zeros((), dtype=torch.int64, device=state.device)
    steps = range(iterations)
    for _ in progress(steps, what=what, unit="batch") if state.rank == 0 else steps:
        batch = next(batches)
        out = trainer.engine.eval_batch(batch)
        total, counts = total + out.sums, _added(counts, out.counts)
        if sizes is not None:
            targets, mask = batch.targets.to(state.device), batch.mask.to(state.device)
            read += sizes[targets].masked_fill(mask == 0, 0).sum()
    if sizes is None:
        return Sums(objective, tuple(total.tolist()), counts)
    if (group := state.group("data")) is not None:
        dist.all_reduce(read, group=group)
    return Sums(objective, tuple(total.tolist()), counts, int(read))


def evaluate_sets(trainer: Trainer, sets: Sequence[NamedSet], sizes: Tensor | None = None) -> None:
    """Report every set as `validation/<name>`, and the sets of every tag together as `validation/<tag>`.

    A tag's `lm_loss` is per token over all its sets, as if they were one, its `bits_per_byte` per byte; `lm_loss_macro`
    is the mean of their losses.
    """
    found: dict[str, Sums] = {}
    for one in sets:
        found[one.name] = add_up(trainer, one.batches(0), one.iterations, one.name, sizes)
        trainer.call("evaluated", f"validation/{one.name}", found[one.name].metrics)
    for tag in dict.fromkeys(tag for one in sets for tag in one.tags):
        sums = [found[one.name] for one in sets if tag in one.tags]
        macro = math.fsum(one.metrics["lm_loss"] for one in sums) / len(sums)
        trainer.call("evaluated", f"validation/{tag}", reduce(add, sums).metrics | {"lm_loss_macro": macro})


def evaluated_weights(trainer: Trainer) -> AbstractContextManager[None]:
    """Inside, the model has the weights that are evaluated: their average, if there is one for that."""
    return trainer.engine.averaged() if trainer.args.optimizer.ema_evaluate else nullcontext()


@contextmanager
def used_as_model(trainer: Trainer) -> Iterator[None]:
    """Inside, the model scores or writes texts (`Engine.run_stage`); random numbers and the time in steps go on
    afterwards as if nothing had been."""
    before, began = random_state(), time.monotonic()
    with evaluated_weights(trainer), trainer.engine.evaluating(), trainer.progress.during("evaluation"):
        yield
    restore_random_state(before)
    trainer.progress.discount(time.monotonic() - began)


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
    names are evaluated along with it, each time on the same samples. With a `tokenizer` whose tokens are a known number
    of bytes the loss is reported in bits per byte, too.
    """

    def __init__(
        self,
        interval: int,
        iterations: int,
        valid: Batches | None,
        test: Batches | None,
        sets: Sequence[NamedSet] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.interval = interval
        self.iterations = iterations
        self.valid = valid
        self.test = test
        self.sets = sets
        self.tokenizer = tokenizer
        self._evaluated_at = -1

    @classmethod
    def build(cls, context: RunContext) -> Evaluator:
        training, batches = context.args.training, context.batches
        valid, test = batches.get("valid"), batches.get("test")
        return cls(training.eval_interval, training.eval_iters, valid, test, context.sets, context.tokenizer)

    @cached_property
    def _counts(self) -> np.ndarray | None:
        return None if self.tokenizer is None else self.tokenizer.byte_counts()

    def _sizes(self, trainer: Trainer) -> Tensor | None:
        return None if self._counts is None else torch.from_numpy(self._counts).to(trainer.state.device)

    def loaded(self, trainer: Trainer) -> None:
        self._evaluated_at = -1  # a run that went back comes to the same steps again

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if due(trainer.step, self.interval):
            self._validate(trainer)

    def _validate(self, trainer: Trainer) -> None:
        if self.iterations <= 0 or self._evaluated_at == trainer.step:
            return
        trainer.settle()
        self._evaluated_at = trainer.step
        with trainer.progress.during("evaluation"), evaluated_weights(trainer):
            if self.valid is not None:
                self._validate_on(self.valid, trainer)
            evaluate_sets(trainer, self.sets, self._sizes(trainer))

    def _validate_on(self, valid: Batches, trainer: Trainer) -> None:
        # The k-th validation, counted from 0; the one at the end counts on from the last multiple of the interval.
        number = -(-trainer.step // self.interval) - 1 if self.interval > 0 else 0
        # What was loaded may be further than a run that only evaluates (train_iters 0) has samples for.
        number = min(number, (trainer.args.training.train_iters or 0) // max(1, self.interval))
        consumed = max(0, number) * self.iterations * trainer.args.training.train_batch_size
        self._report(trainer, valid(consumed), "validation")

    def _report(self, trainer: Trainer, batches: Iterator[StepBatch], split: str) -> None:
        sums = add_up(trainer, batches, self.iterations, split, self._sizes(trainer))
        trainer.call("evaluated", split, sums.metrics)

    def end(self, trainer: Trainer) -> None:
        if trainer.step < (trainer.args.training.train_iters or 0):
            return  # stopped early: the last evaluation belongs to the last step of the resumed run
        self._validate(trainer)
        if self.test is not None and self.iterations > 0:
            with trainer.progress.during("evaluation"), evaluated_weights(trainer):
                self._report(trainer, self.test(0), "test")
