"""Adapters beside frozen weights: the same curve at every layout, and against PEFT."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megatron.errors import UserError
from tests.distributed import run_distributed
from tests.distributed.client import RankFailure
from tests.training.tiny import LLAMA, NEOX, Layout, build, step_batch, train

pytestmark = pytest.mark.cpu

STEPS = 4
LORA: dict[str, Any] = {"lora_r": 3, "lora_alpha": 6.0}
DORA = {**LORA, "use_dora": True, "use_rslora": True}


@functools.cache
def _alone(dora: bool, neox: bool) -> dict[str, list[float]]:
    keys = {**(NEOX if neox else LLAMA), **(DORA if dora else LORA)}
    return run_distributed(train, 1, keys, Layout(), STEPS)[0]


@pytest.mark.parametrize(
    ("layout", "dora", "neox"),
    [
        (Layout(tp=2, sequence_parallel=True), True, False),
        (Layout(pp=2, tp=2), True, True),
        (Layout(pp=2, dp=2, zero=1, micro=1), False, False),
        (Layout(dp=2, zero=2), True, False),
        (Layout(tp=2, dp=2, zero=3), True, True),
        (Layout(tp=2, dp=2, engine="native"), True, False),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_curve_is_the_same_at_every_layout(layout: Layout, dora: bool, neox: bool) -> None:
    alone = _alone(dora, neox)
    keys = {**(NEOX if neox else LLAMA), **(DORA if dora else LORA)}
    for curve in run_distributed(train, layout.world, keys, layout, STEPS, timeout=150):
        for name in alone:
            assert curve[name] == pytest.approx(alone[name], rel=1e-5), name


def _base_alone(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> tuple[list[float], set[str], set[str]]:
    """Loss of one batch: before training, behind it, and then without adapters; what was trained, what has moments."""
    engine, args, lr = build(rank, keys, layout)
    batch = step_batch(99, args, engine.state)
    losses = [float(engine.eval_batch(batch)[0])]
    for step in range(2):
        engine.train_batch(step_batch(step, args, engine.state), lr(step) * 10)
    losses.append(float(engine.eval_batch(batch)[0]))
    with engine.without_adapters():
        losses.append(float(engine.eval_batch(batch)[0]))
    losses.append(float(engine.eval_batch(batch)[0]))
    trained = {name for name, p in engine.params().items() if p.requires_grad}
    kept = {name for name in engine.params() if set(engine.read_share(name)) > {"weight"}}
    return losses, trained, kept


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2, zero=3), Layout(engine="native")], ids=lambda x: x.name)
def test_the_base_is_frozen_and_can_be_asked_alone(layout: Layout) -> None:
    unfrozen = [{"match": "*.norm.scale", "freeze": False}]
    keys = {**LLAMA, **LORA, "lora_target_modules": ["query_key_value", "3.mlp.*"], "parameter_groups": unfrozen}
    found = run_distributed(_base_alone, layout.world, keys, layout)
    before, behind, without, again = found[0][0]
    assert behind != before and again == behind
    assert without == pytest.approx(before, rel=1e-3)  # only the last norm has moved
    trained = set().union(*(one[1] for one in found))
    layers = ("2.attention.query_key_value", "3.attention.query_key_value", "3.mlp.linear1", "3.mlp.linear2")
    assert trained == {"5.norm.scale", *(f"{layer}.lora.{part}" for layer in layers for part in "AB")}
    assert trained == set().union(*(one[2] for one in found))


def test_a_name_that_is_no_layer_is_refused_with_those_that_are() -> None:
    keys = {**LLAMA, **LORA, "lora_target_modules": ["q_proj"]}
    with pytest.raises((UserError, RankFailure), match="'q_proj' is no linear layer.*attention.query_key_value"):
        run_distributed(train, 1, keys, Layout(), 1)
