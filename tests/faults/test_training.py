"""Known faults of training: the evaluation loss of a pipeline (41), skipped steps and resuming (46), muP that does
nothing (80)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.layers.carry import Carry
from tests.distributed import run_distributed
from tests.training import runs
from tests.training.tiny import NEOX, Layout, build, step_batch, train

pytestmark = pytest.mark.cpu


def test_every_stage_knows_the_evaluation_loss_of_a_bf16_pipeline() -> None:
    """41: the loss of the last stage arrives whole in a buffer of its own type on the others."""
    keys = {**NEOX, "precision": "bfloat16"}
    alone = run_distributed(train, 1, keys, Layout(), 2)[0]["eval"]
    piped = [curve["eval"] for curve in run_distributed(train, 4, keys, Layout(pp=2, tp=2), 2, timeout=110)]
    assert all(loss == piped[0] for loss in piped)
    assert piped[0] == pytest.approx(alone, rel=1e-3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.corpus(tmp_path_factory.mktemp("corpus"))


def test_a_run_resumed_after_a_skipped_step_agrees_with_one_that_went_on(tmp_path: Path, data: str) -> None:
    """46: the update of step 3 of 6 is skipped; samples, schedule and optimizer go on from there as they would have."""
    keys = {"data_path": data, "checkpoint_factor": 4}
    faults = runs.Faults(nan_gradients=(3,))
    straight = runs.run({**keys, "save": str(tmp_path / "a")}, faults=faults)[0]
    assert straight.skipped == [False, False, True, False, False, False]
    without = runs.run({**keys})[0]
    assert straight.lr == without.lr and straight.tokens == without.tokens  # the rule: a skipped step is a step
    again = {"load": str(tmp_path / "a"), "iteration": 4, "save": str(tmp_path / "b")}
    resumed = runs.run({**keys, **again})[0]
    assert resumed.steps == [5, 6] and not any(resumed.skipped)
    assert resumed.lr == straight.lr[4:] and resumed.tokens[:2] == straight.tokens[4:6]
    assert resumed.loss == straight.loss[4:] and resumed.state == straight.state


MUP = {"use_mup": True, "mup_base_hidden_size": 32}
WIDE = {**NEOX, "num_kv_heads": 4, "hidden_size": 64}


def rates(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> dict[str, float]:
    """The learning rate with which each kind of parameter is updated."""
    engine, args, lr = build(rank, keys, layout)
    engine.train_batch(step_batch(0, args, engine.state), lr(5))
    inner = engine.deepspeed.optimizer
    groups = [{group["lr"] for group in one.param_groups} for one in (inner, getattr(inner, "optimizer", inner))]
    assert groups[0] == groups[1]
    return {"peak": lr(5), "slowest": min(groups[0]), "fastest": max(groups[0])}


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(Layout(), "fp32"), (Layout(), "bfloat16"), (Layout(dp=2, zero=1), "fp32"), (Layout(dp=2, zero=3), "bfloat16")],
    ids=str,
)
def test_hidden_matrices_learn_slower_by_the_width_under_mup(layout: Layout, precision: str) -> None:
    """80: twice the base width, half the learning rate, in every optimizer; off, all learn alike."""
    keys = {**WIDE, "precision": precision}
    for found in run_distributed(rates, layout.world, {**keys, **MUP}, layout):
        assert found["fastest"] == found["peak"] and found["slowest"] == found["peak"] / 2
    for found in run_distributed(rates, layout.world, keys, layout):
        assert found["fastest"] == found["slowest"] == found["peak"]


SEEDS = range(8)


def sizes(rank: int, world: int, hidden: int, keys: dict[str, Any]) -> tuple[float, ...]:
    """Mean size of what the blocks put out and of the logits after three steps of the whole engine, over some seeds
    (at width 32 a single draw of the weights says little)."""
    return tuple(sum(values) / len(SEEDS) for values in zip(*(size(rank, hidden, keys, seed) for seed in SEEDS)))


def size(rank: int, hidden: int, keys: dict[str, Any], seed: int) -> tuple[float, float]:
    keys = {**WIDE, "hidden_size": hidden, "seed": seed, "warmup": 0.0, "gradient_clipping": 0.0, **keys}
    keys["optimizer"] = {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8}}
    engine, args, lr = build(rank, keys, Layout(micro=8))
    for step in range(3):
        engine.train_batch(step_batch(step, args, engine.state), lr(step))
    batch, layers = step_batch(9, args, engine.state), engine.module.sequential
    with torch.no_grad():
        carry = Carry(batch.tokens[0], batch.positions[0])
        for layer in layers[: 1 + args.model.num_layers]:
            carry = layer(carry)
        logits = engine.module((batch.tokens[0], batch.positions[0]), then=lambda out: out.logits())
    return float(carry.hidden.abs().mean()), float(logits.abs().mean())


def test_activations_keep_their_size_with_the_width_under_mup_only() -> None:
    """80: width 32 against 64, three steps of the real engine: within 20 % under muP. Off, the wider one runs away."""
    found = {
        (hidden, bool(keys)): run_distributed(sizes, 1, hidden, keys)[0] for hidden in (32, 64) for keys in ({}, MUP)
    }
    with_mup, without = (
        [wide / base for wide, base in zip(found[64, on], found[32, on], strict=True)] for on in (True, False)
    )
    assert all(0.8 < ratio < 1.2 for ratio in with_mup), (with_mup, without)
    assert min(without) > 1.4, (with_mup, without)
