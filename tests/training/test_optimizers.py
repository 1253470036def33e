"""Optimizers through the engine: offloaded state changes no number, and every kind's state moves to another layout."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed import run_distributed
from tests.training.tiny import NEOX, Layout, build, step_batch, whole_state

pytestmark = pytest.mark.cpu

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
Curve = list[tuple[float, float]]


def _build(rank: int, keys: dict[str, Any], layout: Layout, zero: dict[str, Any]) -> tuple[Any, Any, Any]:
    given = layout.keys() | {"zero_optimization": {"stage": layout.zero, **zero}}
    with mock.patch.object(Layout, "keys", lambda self: given):
        return build(rank, keys, layout)


def _train(built: tuple[Any, Any, Any], steps: range) -> Curve:
    engine, args, lr = built
    curve = []
    for step in steps:
        out = engine.train_batch(step_batch(step, args, engine.state), lr(step))
        curve.append((float(out.loss), float(out.grad_norm)))
    return curve


def _with_a_bad_step(built: tuple[Any, Any, Any]) -> tuple[Curve, dict[str, dict[str, torch.Tensor]]]:
    """Curve and state of five steps, the third of which is skipped because a gradient is not finite."""
    engine = built[0]
    curve = _train(built, range(2))

    def spoil() -> None:
        for gradient in engine.grads().values():
            gradient.view(-1)[:1] = torch.nan

    engine.before_update = spoil
    curve += _train(built, range(2, 3))
    engine.before_update = None
    return curve + _train(built, range(3, 5)), whole_state(engine)


def _offloaded(rank: int, world: int) -> list[tuple[Any, Any]]:
    found = []
    for stage, more, precision in ((1, {}, "fp32"), (1, {}, "bfloat16"), (2, {}, "fp32"), (3, {}, "fp32")):
        more = {**OFFLOAD, **({"offload_param": {"device": "cpu"}} if stage == 3 else more)}
        layout, keys = Layout(dp=2, micro=2, zero=stage), {**NEOX, "precision": precision}
        found.append(tuple(_with_a_bad_step(_build(rank, keys, layout, zero)) for zero in ({}, more)))
    return found


def test_offloaded_state_changes_no_number() -> None:
    """The norm, the clip (0.25, which acts), a skipped step, weights and moments."""
    for kept, offloaded in run_distributed(_offloaded, 2, timeout=150)[0]:
        for (loss, norm), (other_loss, other_norm) in zip(kept[0], offloaded[0], strict=True):
            assert other_loss == pytest.approx(loss, rel=1e-6)
            assert other_norm == pytest.approx(norm, rel=1e-5, nan_ok=True)
        assert sum(norm != norm for _, norm in kept[0]) == 1
        for name, values in kept[1].items():
            for key, value in values.items():
                difference = (offloaded[1][name][key] - value).abs().max()
                assert difference <= 2e-5 * value.abs().max(), (name, key)


KINDS: dict[str, dict[str, Any]] = {
    "adam, offloaded": {"type": "cpu_adam", "params": {"lr": 1e-3}},
    "sm3": {"type": "SM3", "params": {"lr": 1e-2, "momentum": 0.9, "beta": 0.9}},
    "madgrad": {"type": "madgrad_wd", "params": {"lr": 1e-3}},
    "1-bit adam": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 3}},
}


def _moved(rank: int, world: int) -> dict[str, tuple[Curve, Curve]]:
    """Steps 2 to 4 going on, and of another layout that was given the state after step 1."""
    found = {}
    for name, optimizer in KINDS.items():
        zero = OFFLOAD if "offloaded" in name else {}
        keys = {**NEOX, "optimizer": optimizer, "warmup": 0.0}
        first = _build(rank, keys, Layout(dp=2, micro=2, zero=1), zero)
        _train(first, range(2))
        state, scalars = whole_state(first[0]), first[0].scalars()
        other = _build(rank, keys, Layout(dp=2, micro=1, zero=2), zero)
        for parameter, values in state.items():
            share = other[0].share(parameter)
            mine = {key: value.view(-1)[share.start : share.stop] for key, value in values.items()}
            other[0].write_share(parameter, mine)
        other[0].finish_writing()
        other[0].load_scalars(scalars)
        found[name] = (_train(first, range(2, 5)), _train(other, range(2, 5)))
    return found


def test_the_state_of_every_kind_moves_to_another_layout() -> None:
    for name, (curve, other) in run_distributed(_moved, 2, timeout=150)[0].items():
        assert len({loss for loss, _ in curve}) == 3
        for (loss, norm), (other_loss, other_norm) in zip(curve, other, strict=True):
            assert other_loss == pytest.approx(loss, rel=1e-5), name
            assert other_norm == pytest.approx(norm, rel=1e-4), name


def _without_a_rate(rank: int, world: int) -> float:
    keys = {**NEOX, "optimizer": {"type": "Adam", "params": {"lr": 0.0}}, "min_lr": 0.0}
    built = _build(rank, keys, Layout(micro=2), {})
    before = {name: p.detach().clone() for name, p in built[0].params().items()}
    _train(built, range(3))
    return max(float((p.detach() - before[name]).abs().max()) for name, p in built[0].params().items())


def test_a_learning_rate_of_zero_changes_no_weight() -> None:
    assert run_distributed(_without_a_rate, 1, timeout=60) == [0.0]


def _thawed(rank: int, world: int) -> dict[str, float]:
    """How far state lies from what it is before the first step, by its name, once weights are written without it."""
    keys = {**NEOX, "optimizer": KINDS["madgrad"], "warmup": 0.0}
    built = _build(rank, keys, Layout(micro=2), {})
    _train(built, range(2))
    engine, found = built[0], dict.fromkeys(("weight", "x0", "s", "grad_sum_sq"), 0.0)
    for name in engine.params():
        given = torch.linspace(-1, 1, len(engine.share(name)))
        engine.write_share(name, {"weight": given})
        expected = {"weight": given, "x0": given}
        for key, value in engine.read_share(name).items():
            found[key] = max(found[key], float((value.view(-1) - expected.get(key, 0.0)).abs().max()))
    return found


def test_weights_without_their_state_begin_anew() -> None:
    assert run_distributed(_thawed, 1, timeout=60) == [{"weight": 0.0, "x0": 0.0, "s": 0.0, "grad_sum_sq": 0.0}]
