"""Preference pairs through the engines: the same curve, metrics and evaluation at every layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from megatron.data.batch import StepBatch
from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.sample import IGNORE, Item, Sample
from megatron.neox_arguments.batch_plan import BatchPlan
from tests.distributed import run_distributed
from tests.training.tiny import BATCH, LLAMA, SEQUENCE, VOCAB, Layout, build

pytestmark = pytest.mark.cpu

STEPS = 6
KEYS: dict[str, Any] = {
    **LLAMA,
    "train_impl": "dpo",
    "dataset_impl": "pairwise",
    "pack_impl": "unpacked",
    "intra_document_masking": True,
    "dpo_beta": 0.5,
    "dpo_sft_loss_weight": 0.1,
    "train_iters": STEPS,
}


class PairItems:
    """Pairs of different lengths, some of which train nothing, as two rows or one; a pair has a reference."""

    def __init__(self, packed: bool) -> None:
        self.packed = packed

    def __len__(self) -> int:
        return 1000 * BATCH

    def __getitem__(self, number: int) -> Item:
        rng = np.random.default_rng(number)
        prompt, longest = rng.integers(1, 3), SEQUENCE // 2
        sides = []
        for _ in range(2):
            tokens = rng.integers(VOCAB, size=rng.integers(prompt + 1, longest))
            trained = (np.arange(len(tokens)) >= prompt) & (number % 5 != 2)
            sides.append((tokens, np.where(trained, tokens, IGNORE), np.log(rng.random(len(tokens)))))
        rows = [sides] if self.packed else [[side] for side in sides]
        samples = tuple(self._row(row) for row in rows)
        return samples[0] if self.packed else samples

    def _row(self, sides: list[tuple[np.ndarray, ...]]) -> Sample:
        ends = np.cumsum([0, *(len(tokens) for tokens, *_ in sides)])
        pad = SEQUENCE + 1 - ends[-1]
        tokens, labels, reference = (np.concatenate(parts) for parts in zip(*sides, strict=True))
        answers = np.repeat([*range(len(sides)), -1], [*np.diff(ends), pad]) if self.packed else None
        labels = np.pad(labels, (0, pad), constant_values=IGNORE)
        extras = {"reference": np.pad(reference, (0, pad))}
        return Sample(np.pad(tokens, (0, pad)), ends[:-1], labels, int(ends[-1]), answers, extras)


def pair_batch(step: int, args: Any, state: Any, packed: bool) -> StepBatch:
    reads = ("answers", "trained_places", "reference")
    rules = CollateRules(SEQUENCE, intra_document_masking=True, vocab_size=VOCAB, reads=reads)
    loader = StepLoader(
        PairItems(packed),
        micro_batch=args.training.train_micro_batch_size_per_gpu,
        gas=args.training.gradient_accumulation_steps,
        rules=rules,
        dp_rank=state.dp_rank,
        dp_size=state.dp_size,
        plan=(plan := BatchPlan.of(args)),
        rows=1 if packed else 2,
    )
    return loader.read(plan.samples(step), step)


def train(rank: int, world: int, keys: dict[str, Any], layout: Layout, packed: bool) -> dict[str, list[float]]:
    engine, args, lr = build(rank, keys, layout)
    curve: dict[str, list[float]] = {"loss": [], "grad_norm": [], "metrics": []}
    for step in range(STEPS):
        out = engine.train_batch(pair_batch(step, args, engine.state, packed), lr(step))
        curve["loss"].append(float(out.loss))
        curve["grad_norm"].append(float(out.grad_norm))
        curve["metrics"] += [float(out.metrics[name]) for name in engine.objective.metrics]
    evaluated = engine.eval_batch(pair_batch(99, args, engine.state, packed))
    curve["eval"] = [*(evaluated.sums / evaluated.sums.new_tensor(evaluated.counts)).tolist(), *evaluated.counts]
    return curve


@cache
def reference() -> dict[str, list[float]]:
    """One rank, one micro-batch."""
    return run_distributed(train, 1, KEYS, Layout(micro=BATCH), False, timeout=120)[0]


@pytest.mark.parametrize(
    ("layout", "packed"),
    [
        (Layout(pp=2, tp=2, micro=1, sequence_parallel=True), False),
        (Layout(pp=2, dp=2, micro=2, zero=1), True),
        (Layout(dp=2, tp=2, micro=1, zero=3), False),
        (Layout(dp=2, micro=4, engine="native"), True),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_the_curve_of_pairs_is_the_same(layout: Layout, packed: bool) -> None:
    ours = reference()
    assert ours["loss"][-1] < ours["loss"][0] and max(ours["grad_norm"]) > KEYS["gradient_clipping"]
    for curve in run_distributed(train, layout.world, KEYS, layout, packed, timeout=180):
        assert curve["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        assert curve["grad_norm"] == pytest.approx(ours["grad_norm"], rel=2e-5)
        assert curve["metrics"] == pytest.approx(ours["metrics"], rel=1e-5, abs=1e-6)
        assert curve["eval"] == pytest.approx(ours["eval"], rel=1e-5, abs=1e-6)
