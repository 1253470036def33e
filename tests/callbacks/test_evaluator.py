"""Which samples a validation reads, when it runs, and what it reports."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.callbacks.evaluator import Evaluator, NamedSet, perplexity
from megatron.callbacks.samples import Samples
from megatron.callbacks.task_evaluator import TaskEvaluator
from megatron.objectives import Objective
from megatron.tokenizer.simple import ByteTokenizer
from megatron.training.engine import EvalOut
from tests.callbacks.fakes import KEYS, GoesBack, Log, args_of, batches, evaluated, run_and_go_back, trainer_of

pytestmark = pytest.mark.cpu

BATCH = KEYS["train_batch_size"]


def run(interval, iterations=2, start=0, stop=None, test=batches, **keys):
    """(steps and splits evaluated, what was consumed before each batch that was read)."""
    log = Log()
    trainer = trainer_of([Evaluator(interval, iterations, batches, test), log], **keys)
    trainer.step = start
    if stop is not None:
        trainer.callbacks.append(stop)
    trainer.run()
    return [(step, split) for step, split, _ in log.evaluated_], trainer.engine.evaluated


def consumed(*validations, iterations=2):
    return [(k * iterations + i) * BATCH for k in validations for i in range(iterations)]


def test_each_validation_reads_the_next_samples_and_the_end_the_test_set():
    evaluated, read = run(4)
    assert evaluated == [(4, "validation"), (8, "validation"), (10, "validation"), (10, "test")]
    assert read == consumed(0, 1, 2) + consumed(0)


@pytest.mark.parametrize(("start", "left"), [(4, (1, 2)), (5, (1, 2)), (8, (2,)), (10, (2,))])
def test_a_resumed_run_reads_what_an_uninterrupted_one_would_have(start, left):
    _, read = run(4, start=start)
    assert read == consumed(*left) + consumed(0)


def test_a_validation_at_the_last_step_is_not_repeated():
    evaluated, read = run(5)
    assert evaluated == [(5, "validation"), (10, "validation"), (10, "test")]
    assert read == consumed(0, 1) + consumed(0)


def test_a_stopped_run_leaves_its_last_evaluation_to_the_resumed_one():
    class Stop(Log):
        def after_step(self, trainer, out):
            if trainer.step == 6:
                trainer.request_stop("enough")

    assert run(4, stop=Stop())[0] == [(4, "validation")]


# A step that is about to be evaluated may itself be what the run goes back for.
@pytest.mark.parametrize(("bad", "evaluated"), [(4, [4, 6]), (5, [4, 4, 6])])
def test_a_run_that_goes_back_evaluates_the_same_step_again(bad, evaluated):
    log = Log()
    trainer = trainer_of([GoesBack(bad), Evaluator(4, 1, batches, None), log], train_iters=6)
    run_and_go_back(trainer, 3)
    assert [step for step, *_ in log.evaluated_] == evaluated


@pytest.mark.parametrize(("module", "kind"), [("samples", Samples), ("task_evaluator", TaskEvaluator)])
def test_a_run_that_goes_back_samples_and_scores_the_same_step_again(monkeypatch, module, kind):
    """The model is asked nothing: only when it would be."""
    at, one = [], kind.__new__(kind)
    lead = {"samples": [("a", "b")], "task_evaluator": {"acc": 0.5}}[module]
    team = SimpleNamespace(run=lambda work: work())
    for name in ("live_stage", "TextGenerator", "evaluation_team", "used_as_model", "batch_size"):
        made = nullcontext() if name == "used_as_model" else SimpleNamespace(team=team, run=team.run)
        monkeypatch.setattr(f"megatron.callbacks.{module}.{name}", lambda *a, made=made, **k: made, raising=False)
    monkeypatch.setattr(kind, "_lead", lambda self, team, step: (at.append(step), lead)[1])
    values = {"args": args_of(), "tokenizer": None, "every": 4, "interval": 4, "ends": (), "exported": None}
    vars(one).update(values, control=SimpleNamespace(broadcast=lambda x: x))
    trainer = trainer_of([one, GoesBack(5)], train_iters=6)
    monkeypatch.setattr(trainer.engine, "evaluating", nullcontext, raising=False)
    run_and_go_back(trainer, 3)
    assert [step for step in at if step] == [4, 4, 6]


@pytest.mark.parametrize(("interval", "expected"), [(0, [10]), (-1, [10])])
def test_without_interval_only_the_end_is_validated(interval, expected):
    evaluated, read = run(interval)
    assert [step for step, split in evaluated if split == "validation"] == expected
    assert read == consumed(0) + consumed(0)


@pytest.mark.parametrize("evaluates", [True, False])
def test_the_average_of_the_weights_is_evaluated(evaluates):
    """Once for each evaluation, around all that it reads; not while the model trains."""
    seen = []
    trainer = trainer_of([Evaluator(4, 2, batches, batches)], ema_decay=0.9, ema_evaluate=evaluates)

    @contextmanager
    def averaged():
        before = len(trainer.engine.evaluated)
        yield
        seen.append((trainer.step, len(trainer.engine.evaluated) - before))

    trainer.engine.averaged = averaged
    trainer.run()
    assert seen == ([(4, 2), (8, 2), (10, 2), (10, 2)] if evaluates else [])
    assert len(trainer.engine.evaluated) == 8


def test_without_iterations_or_data_nothing_is_evaluated():
    assert run(4, iterations=0) == ([], [])
    trainer = trainer_of([Evaluator(4, 2, None, None)])
    trainer.run()
    assert trainer.engine.evaluated == []


def test_named_sets_read_the_same_batches_every_time_and_are_reported_singly_and_by_tag():
    log, sets = Log(), [NamedSet("a", ("x",), 1, batches), NamedSet("b", ("x", "y"), 3, batches)]
    trainer = trainer_of([Evaluator(4, 2, batches, None, sets), log], train_iters=8)
    losses = iter([1.0, 1.0, 2.0, 5.0, 5.0, 5.0] * 2)
    counted = trainer.engine.eval_batch
    trainer.engine.eval_batch = lambda batch: (counted(batch), evaluated(next(losses) * 32))[1]
    trainer.run()
    reported = [(step, split, metrics["lm_loss"]) for step, split, metrics in log.evaluated_]
    one = [("validation", 1), ("validation/a", 2), ("validation/b", 5), ("validation/x", 4.25), ("validation/y", 5)]
    assert reported == [(step, split, loss) for step in (4, 8) for split, loss in one]
    assert trainer.engine.evaluated == consumed(0) + [0, 0, BATCH, 2 * BATCH] + consumed(1) + [0, 0, BATCH, 2 * BATCH]
    assert log.evaluated_[3][2]["lm_loss_macro"] == 3.5  # of sets; per token it is 4.25


def test_named_sets_without_a_validation_list():
    log = Log()
    trainer_of([Evaluator(0, 1, None, None, [NamedSet("a", (), 1, batches)]), log]).run()
    assert [(step, split) for step, split, _ in log.evaluated_] == [(10, "validation/a")]
    log = Log()
    trainer_of([Evaluator(4, 0, None, None, [NamedSet("a", (), 1, batches)]), log]).run()
    assert log.evaluated_ == []


def test_loss_is_per_token_and_perplexity_its_exponential():
    log = Log()
    trainer = trainer_of([Evaluator(10, 3, batches, None), log])
    trainer.engine.eval_loss = 3.0
    trainer.run()
    ((step, split, metrics),) = log.evaluated_
    assert (step, split) == (10, "validation")
    assert metrics == pytest.approx({"lm_loss": 3.0, "lm_loss_ppl": math.exp(3.0)})


def test_bits_per_byte_count_the_bytes_of_the_trained_targets_of_each_set():
    """Tokens of 1, 2 and 5 bytes; those that are not trained, and special ones, count none."""

    class Sizes(ByteTokenizer):
        def byte_counts(self):
            return np.array([1, 2, 5, 0])

    def scored(consumed):
        while True:
            targets = torch.tensor([[[0, 1, 2], [3, 2, 2]]])
            yield SimpleNamespace(consumed=consumed, targets=targets, mask=torch.tensor([[[1.0, 1, 0], [1, 1, 0]]]))

    log, sets = Log(), [NamedSet("a", ("t",), 1, scored), NamedSet("b", ("t",), 3, scored)]
    trainer = trainer_of([Evaluator(10, 2, scored, None, sets, Sizes()), log])
    losses = iter([10.0, 20.0, 8.0, 1.0, 2.0, 3.0])
    trainer.engine.eval_batch = lambda batch: evaluated(next(losses), 4)
    trainer.run()
    found = [metrics["bits_per_byte"] for _, _, metrics in log.evaluated_]
    expected = [30 / 16, 8 / 8, 6 / 24, 14 / 32]
    assert found == pytest.approx([nats / math.log(2) for nats in expected])
    assert [metrics["lm_loss"] for _, _, metrics in log.evaluated_] == pytest.approx([30 / 8, 2, 0.5, 14 / 16])


@pytest.mark.parametrize(
    ("loss", "expected"), [(0.0, 1.0), (709.0, math.exp(709)), (710.0, math.inf), (math.inf, math.inf)]
)
def test_perplexity_ends_at_infinity(loss, expected):
    assert perplexity(loss) == expected


def test_perplexity_of_nan_is_nan():
    assert math.isnan(perplexity(math.nan))


def test_metrics_of_an_objective_are_means_over_what_it_counts_without_a_perplexity():
    """Two batches of pairs: sums and counts add up before they are divided, each by its own count."""

    class Preferences(Objective):
        counts, metrics, over = ("pairs", "words"), ("accuracy", "nll"), {"nll": "words"}

        def loss(self, out, labels):
            raise NotImplementedError

    log = Log()
    trainer = trainer_of([Evaluator(10, 2, batches, None, [], ByteTokenizer()), log])
    trainer.engine.objective = Preferences()
    sums = iter([[6.0, 1.0, 10.0], [2.0, 1.0, 0.0]])
    counts = iter([(3, 3, 5), (1, 1, 0)])
    trainer.engine.eval_batch = lambda batch: EvalOut(torch.tensor(next(sums)), next(counts), 5)
    trainer.run()
    assert [metrics for _, _, metrics in log.evaluated_] == [{"lm_loss": 2.0, "accuracy": 0.5, "nll": 2.0}]
