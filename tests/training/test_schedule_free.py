"""Schedule-free optimizers through the engines: the weights in training and their average against the published formula
in fp64, the same curve at every layout, what is evaluated, and what checkpoints hold."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.find import find_checkpoint, open_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.save import save_checkpoint
from megatron.convert.hf.export_hf import export
from megatron.mpu.sharding import named_parameters
from tests.distributed import run_distributed
from tests.inference.models import stage_of
from tests.training.test_parameter_groups import HEADS, _load, _save
from tests.training.tiny import LLAMA, Layout, build, step_batch, train, whole_state

pytestmark = pytest.mark.cpu

STEPS = 20
_SHARED = {**LLAMA, "lr_decay_style": "constant", "no_weight_tying": True}
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {
        **_SHARED,
        "optimizer": {"type": "schedule_free", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "r": 1.0}},
    },
    "sgd": {**_SHARED, "optimizer": {"type": "schedule_free_sgd", "params": {"lr": 1e-2, "momentum": 0.8}}},
}


def _beside_formula(rank: int, world: int, kind: str, layout: Layout) -> tuple[float, float]:
    """Largest differences of y and x after some steps from the formula on the same gradients, in its three sequences;
    half the learning rate, and no decay, for some."""
    rules = [{"match": "2.*", "lr_mult": 0.5, "weight_decay": 0.0}]
    engine, args, lr = build(rank, {**KINDS[kind], "gradient_clipping": 0.0, "parameter_groups": rules}, layout)
    x = {name: values["weight"].double() for name, values in whole_state(engine).items()}
    y, z, total, largest = dict(x), dict(x), 0.0, 0.0
    squares = {name: torch.zeros_like(w) for name, w in x.items()}
    beta, (r, power) = (0.9, (1.0, 2.0)) if kind == "adamw" else (0.8, (0.0, 2.0))
    for step in range(4):
        found: dict[str, torch.Tensor] = {}
        engine.before_update = lambda found=found: found.update({n: g.double() for n, g in engine.grads().items()})
        engine.train_batch(step_batch(step, args, engine.state), lr(step))
        largest = max(largest, lr(step))
        total += (weight := (step + 1) ** r * largest**power)
        share = weight / total if total else 0.0
        for name, g in found.items():
            squares[name] = 0.95 * squares[name] + 0.05 * g * g
            if kind == "adamw":
                g = g / ((squares[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
            decay = 0.0 if name.startswith("2.") or "norm" in name or name.endswith("bias") else 0.1
            mult = 0.5 if name.startswith("2.") else 1.0
            z[name] = z[name] - lr(step) * mult * (g + decay * y[name])
            x[name] = (1 - share) * x[name] + share * z[name]
            y[name] = (1 - beta) * z[name] + beta * x[name]
    assert lr(0) > 0 and len({lr(step) for step in range(4)}) > 1, "a warm-up"
    ours = whole_state(engine)
    with engine.averaged():
        means = whole_state(engine)
    return tuple(  # type: ignore[return-value]
        max(float((found[name]["weight"] - expected[name]).abs().max()) for name in x)
        for found, expected in ((ours, y), (means, x))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_three_sequences_move_by_the_published_formula(kind: str) -> None:
    (differences,) = run_distributed(_beside_formula, 1, kind, Layout())
    assert max(differences) < 1e-6  # of weights around 1, at another place in each sequence


@functools.cache
def _alone(kind: str) -> dict[str, list[float]]:
    return run_distributed(train, 1, KINDS[kind], Layout(), STEPS)[0]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("adamw", Layout(tp=2, sequence_parallel=True)),
        ("adamw", Layout(pp=2)),
        ("sgd", Layout(dp=2, zero=3)),
        pytest.param("adamw", Layout(dp=2, zero=2), marks=pytest.mark.full),
        pytest.param("sgd", Layout(dp=2, tp=2, engine="native"), marks=pytest.mark.full),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_the_curve_is_the_same_at_every_layout(kind: str, layout: Layout) -> None:
    alone = _alone(kind)
    assert alone["loss"][-1] < alone["loss"][0] and max(alone["grad_norm"]) > 0.25
    for curve in run_distributed(train, layout.world, KINDS[kind], layout, STEPS, timeout=150):
        for name in alone:
            assert curve[name] == pytest.approx(alone[name], rel=1e-5), name


CASES: dict[str, tuple[dict[str, Any], Layout]] = {
    "native": ({}, Layout(dp=2, engine="native")),
    "zero 1": ({"precision": "bfloat16"}, Layout(dp=2, zero=1)),
    "zero 3": ({}, Layout(dp=2, zero=3)),
}


def _evaluated(rank: int, world: int, folder: str) -> dict[str, list[str]]:
    """What is wrong with evaluation and with files of weights, by case."""
    found: dict[str, list[str]] = {}
    for case, (more, layout) in CASES.items():
        wrong = found.setdefault(case, [])
        keys = {**KINDS["adamw"], **more}
        built = engine, args, lr = build(rank, keys, layout)
        for step in range(2):
            engine.train_batch(step_batch(step, args, engine.state), lr(step))
        saved = {"heads": HEADS, "consumed": 0, "client": {}, "config": args.to_dict()}
        save_checkpoint(f"{folder}/{case}", 2, engine, engine.state, **saved)
        before, batch = whole_state(engine), step_batch(9, args, engine.state)
        raw = engine.eval_batch(batch).sums
        with engine.averaged():
            averaged = engine.eval_batch(batch).sums
            means = {name: values["weight"] for name, values in whole_state(engine).items()}
        again = engine.eval_batch(batch).sums
        after = whole_state(engine)
        wrong += [f"{n}/{k}" for n, v in before.items() for k in v if not torch.equal(v[k], after[n][k])]
        wrong += [] if torch.equal(raw, again) and not torch.equal(raw, averaged) else [f"{raw} {again} {averaged}"]
        # Weights alone, as another run or evaluation reads them.
        other, *_ = build(rank, {**keys, "optimizer": {"type": "adam", "params": {"lr": 1e-3}}}, layout)
        checkpoint = find_checkpoint(f"{folder}/{case}", None)
        load_checkpoint(checkpoint, other, other.state, heads=HEADS, load_optim=False)
        alone = other.eval_batch(batch).sums
        wrong += [] if torch.equal(averaged, alone) else [f"files evaluate to {alone}, the average to {averaged}"]
        dtype = torch.bfloat16 if more else torch.float32
        reader = CheckpointReader(checkpoint)
        real = {name: mean.to(dtype)[: len(reader.weight(name))] for name, mean in means.items()}  # without padding
        wrong += [name for name, mean in real.items() if not torch.equal(reader.master(name), mean)]
        # With the state: bit by bit, and so is the next step.
        resumed, *_ = build(rank, keys, layout)
        load_checkpoint(checkpoint, resumed, resumed.state, heads=HEADS)
        for one in (engine, resumed):
            one.train_batch(step_batch(2, args, one.state), lr(2))
        left, right = whole_state(engine), whole_state(resumed)
        wrong += [f"{n}/{k} resumed" for n, v in left.items() for k in v if not torch.equal(v[k], right[n][k])]
        assert built[0].scalars() == resumed.scalars() and len(resumed.scalars()["optimizer_counters"]) == 2
    return found


def test_the_average_is_evaluated_and_saved_as_weights(tmp_path: Path) -> None:
    for found in run_distributed(_evaluated, 2, str(tmp_path), timeout=240):
        assert found == {case: [] for case in CASES}
    folder = tmp_path / "native" / "global_step2"
    reader, name = CheckpointReader(open_checkpoint(folder)), "0.word_embeddings.weight"
    table = reader.weight(name)
    assert not torch.equal(table, reader.local_optimizer(name, reader.spec(name), 0, 1)["weight"])
    stage = stage_of(folder, {**KINDS["adamw"], "save": "run"})  # generate.py and eval.py
    held = dict(named_parameters(stage.layers[0]))[name]
    assert torch.equal(held[: len(table)], table)
    export(tmp_path / "native", tmp_path / "hf", tokenizer=False, check=False, averaged=True)  # as without
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"], table)


@pytest.mark.parametrize("kind", KINDS)
def test_its_state_moves_to_another_layout(kind: str, tmp_path: Path) -> None:
    curve, kept = run_distributed(_save, 2, KINDS[kind], Layout(dp=2, engine="native"), str(tmp_path))[0]
    assert all("z" in keys for keys in kept.values())
    for other in (Layout(pp=2), Layout(tp=2)):
        moved, _, _ = run_distributed(_load, 2, KINDS[kind], other, str(tmp_path))[0]
        assert moved == pytest.approx(curve, rel=1e-5)
