"""Training what keeps a state (Mamba, RWKV) and hybrids: the same curve at any layout and recomputation; what stands in
exponents stays in fp32."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.training.models import MODELS
from tests.training.tiny import Layout, build, step_batch, whole_state

pytestmark = pytest.mark.cpu

STEPS = 4
NAMES = ("mamba", "mamba2", "mamba-hybrid", "rwkv4", "rwkv4-hybrid", "rwkv6")


def train(
    rank: int, world: int, keys: dict[str, Any], layout: Layout
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses, gradient norms, and the type of each parameter; checks that those in fp32 are their masters."""
    engine, args, lr = build(rank, keys, layout)
    losses, norms = [], []
    for step in range(STEPS):
        out = engine.train_batch(step_batch(step, args, engine.state), lr(step))
        losses.append(float(out.loss))
        norms.append(float(out.grad_norm))
    types = {name: p.dtype for name, p in engine.params().items()}
    if layout.zero < 3:
        for name, values in whole_state(engine).items():  # the masters themselves
            assert types[name] != torch.float32 or torch.equal(values["weight"], engine.params()[name]), name
    return losses, norms, types


@functools.cache
def alone(name: str, precision: str = "fp32") -> tuple[list[float], list[float], dict[str, Any]]:
    keys = MODELS[name] if precision == "fp32" else {**MODELS[name], "precision": precision}
    return run_distributed(train, 1, keys, Layout())[0]


LAYOUTS = [
    Layout(tp=2),
    Layout(tp=2, micro=1, sequence_parallel=True),
    Layout(pp=2),
    Layout(dp=2, zero=2),
    Layout(dp=2, zero=3),
    Layout(pp=2, tp=2, micro=1, sequence_parallel=True),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
def test_the_curve_does_not_depend_on_the_layout(name: str, layout: Layout) -> None:
    expected = alone(name)
    for losses, norms, _ in run_distributed(train, layout.world, MODELS[name], layout, timeout=110):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert norms == pytest.approx(expected[1], rel=2e-5)


def test_stages_of_a_hybrid_may_have_other_groups_of_parameters() -> None:
    """What stays in fp32 in half precision is a group of its own, and a stage of attention has none; under ZeRO-1 each
    data rank steps by itself."""
    expected, layout = alone("mamba-hybrid"), Layout(pp=2, dp=2, zero=1)
    for losses, norms, _ in run_distributed(train, layout.world, MODELS["mamba-hybrid"], layout, timeout=60):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert norms == pytest.approx(expected[1], rel=2e-5)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("name", NAMES)
def test_recomputation_changes_nothing(name: str, policy: str) -> None:
    found = run_distributed(train, 1, {**MODELS[name], "checkpoint_policy": policy}, Layout())[0]
    assert found[:2] == alone(name)[:2]


HALF = [Layout(), Layout(dp=2), Layout(dp=2, zero=2), Layout(pp=2), Layout(tp=2, micro=1, sequence_parallel=True)]
WIDE = {"mamba": ("A_log", ".D"), "rwkv4": ("time_decay", "time_first")}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("layout", HALF, ids=lambda x: x.name)
def test_in_bf16_what_stands_in_exponents_stays_in_fp32(name: str, layout: Layout) -> None:
    keys = {**MODELS[name], "precision": "bfloat16"}
    for losses, norms, types in run_distributed(train, layout.world, keys, layout, timeout=110):
        wide = {name for name, dtype in types.items() if dtype == torch.float32}
        assert wide == {parameter for parameter in types if parameter.endswith(WIDE[name])} and wide
        assert losses == pytest.approx(alone(name)[0], rel=2e-2)
        assert norms == pytest.approx(alone(name)[1], rel=5e-2)
        assert losses == pytest.approx(alone(name, "bfloat16")[0], rel=5e-3)


@pytest.mark.parametrize(
    ("changes", "layout"), [({"mamba_selective_fp32_params": False}, Layout()), ({}, Layout(dp=2, zero=3))]
)
def test_or_not_when_unset_or_under_zero_3(changes: dict[str, Any], layout: Layout) -> None:
    keys = {**MODELS["mamba"], "precision": "bfloat16", **changes}
    for losses, _, types in run_distributed(train, layout.world, keys, layout, timeout=110):
        assert set(types.values()) == {torch.bfloat16}
        assert losses == pytest.approx(alone("mamba")[0], rel=2e-2)
