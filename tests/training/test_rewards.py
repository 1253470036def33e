"""Reward models and KTO: the same curve at any layout, as `test_invariance.py` has it for plain training."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from megatron.data.batch import StepBatch
from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.sample import IGNORE, Sample
from megatron.neox_arguments.batch_plan import BatchPlan
from tests.distributed import run_distributed
from tests.training.tiny import BATCH, LLAMA, NEOX, SEQUENCE, VOCAB, Layout, build

pytestmark = pytest.mark.cpu

STEPS = 9
AGAIN = 4 * BATCH  # the items of four steps are those of the next four
RM = {"train_impl": "rm", "z_loss": 0.02, "rm_center_coefficient": 0.05}
KTO = {"train_impl": "kto", "kto_beta": 0.5, "kto_desirable_weight": 0.7}
MODELS: dict[str, dict[str, Any]] = {
    "rm": {**NEOX, **RM},
    "rm-tied": {**LLAMA, **RM},
    "kto": {**NEOX, **KTO},
    "kto-tied": {**LLAMA, **KTO},
}


def text(rng: np.random.RandomState) -> np.ndarray:
    return rng.randint(0, VOCAB, SEQUENCE + 1) ** 2 // VOCAB


class Pairs:
    """Of a pair the better answer has more of the low ids; the reward is read behind its last token."""

    def __getitem__(self, number: int) -> tuple[Sample, Sample]:
        rng = np.random.RandomState(number % AGAIN)
        better, worse = sorted((text(rng), text(rng)), key=np.mean)
        margin = np.array([rng.rand()], np.float32)
        return self._row(better, rng, margin), self._row(worse, rng, margin)

    def _row(self, tokens: np.ndarray, rng: np.random.RandomState, margin: np.ndarray) -> Sample:
        length = rng.randint(5, SEQUENCE + 2)
        tokens[length:] = 0
        labels = np.full(SEQUENCE + 1, IGNORE)
        labels[length - 1] = tokens[length - 1]
        return Sample(tokens, np.zeros(1, np.int64), labels, length, extras={"margin": margin})


class Answers:
    """Good answers with low ids, bad ones with high ids, some neither, of different lengths; the log-probabilities of a
    reference that knows nothing."""

    def __getitem__(self, number: int) -> Sample:
        rng = np.random.RandomState(number % AGAIN)
        tokens, length = text(rng), rng.randint(5, SEQUENCE + 2)
        reward = (1.0, -1.0, -1.0, 0.0, 1.0)[number % AGAIN % 5]
        if reward < 0:
            tokens = VOCAB - 1 - tokens
        tokens[length:] = 0
        labels, first = np.full(SEQUENCE + 1, IGNORE), rng.randint(1, 4)
        labels[first:length] = tokens[first:length]
        extras = {
            "reward": np.array([reward], np.float32),
            "reference": -np.log(VOCAB) * np.ones(SEQUENCE + 1, np.float32),
            "z0": np.array([0.3], np.float32),
        }
        return Sample(tokens, np.zeros(1, np.int64), labels, length, extras=extras)


def step_batch(step: int, engine: Any, args: Any) -> StepBatch:
    pairs, objective, state = args.training.train_impl == "rm", engine.objective, engine.state
    loader = StepLoader(
        Pairs() if pairs else Answers(),  # type: ignore[arg-type]
        micro_batch=args.training.train_micro_batch_size_per_gpu,
        gas=args.training.gradient_accumulation_steps,
        rules=CollateRules(SEQUENCE, vocab_size=VOCAB, reads=objective.reads),
        dp_rank=state.dp_rank,
        dp_size=state.dp_size,
        plan=(plan := BatchPlan.of(args)),
        rows=2 if pairs else 1,
        count=objective.count,
    )
    return loader.read(plan.samples(step), step)


def train(rank: int, world: int, model: str, layout: Layout) -> dict[str, list[float]]:
    engine, args, lr = build(rank, MODELS[model], layout)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step in range(STEPS):
        out = engine.train_batch(step_batch(step, engine, args), lr(step))
        found["loss"].append(float(out.loss))
        found["grad_norm"].append(float(out.grad_norm))
        for name, metric in out.metrics.items():
            found.setdefault(name, []).append(float(metric))
    evaluated = engine.eval_batch(step_batch(STEPS, engine, args))
    found["eval"] = [total / n for total, n in zip(evaluated.sums.tolist(), evaluated.counts, strict=True)]
    return found


@functools.cache
def one_rank(model: str, micro: int = BATCH) -> dict[str, list[float]]:
    return run_distributed(train, 1, model, Layout(micro=micro), timeout=120)[0]


COVERING = [
    ("rm", Layout(micro=1)),
    ("rm", Layout(pp=2, tp=2, micro=1, sequence_parallel=True)),
    ("rm-tied", Layout(pp=2, dp=2, zero=1)),
    ("rm-tied", Layout(dp=2, tp=2, micro=1, zero=3)),
    ("rm", Layout(dp=2, tp=2, sequence_parallel=True, engine="native")),
    ("kto", Layout(micro=1)),
    ("kto", Layout(pp=2, tp=2, micro=1, sequence_parallel=True)),
    ("kto-tied", Layout(pp=2, dp=2, zero=1)),
    ("kto-tied", Layout(dp=2, tp=2, micro=1, zero=3)),
    ("kto", Layout(dp=2, tp=2, sequence_parallel=True, engine="native")),
]


@pytest.mark.parametrize(("model", "layout"), COVERING, ids=lambda x: getattr(x, "name", x))
def test_same_curve(model: str, layout: Layout) -> None:
    ours, other = one_rank(model), one_rank(model, 1)
    assert ours["loss"][8] < ours["loss"][4] < ours["loss"][0], "the reference does not learn"
    noise = max(abs(a - b) / b for a, b in zip(other["grad_norm"], ours["grad_norm"], strict=True))
    for curve in run_distributed(train, layout.world, model, layout, timeout=180):
        assert curve.keys() == ours.keys()
        assert curve["grad_norm"] == pytest.approx(ours["grad_norm"], rel=max(1e-5, 10 * noise))
        for name in curve.keys() - {"grad_norm"}:
            assert curve[name] == pytest.approx(ours[name], rel=1e-5, abs=1e-5), name
