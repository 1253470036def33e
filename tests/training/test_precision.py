"""bf16 and fp16: masters and accumulation in fp32, the curve of fp32 within rounding, the dynamic loss scale."""

from __future__ import annotations

import contextlib
import functools
import re
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from tests.distributed import run_distributed
from tests.training import runs, tiny
from tests.training.tiny import LLAMA, Layout, build, step_batch

pytestmark = pytest.mark.cpu

STEPS = 6
BF16 = {"precision": "bfloat16"}
LAYOUTS = [Layout(dp=2), Layout(pp=2, tp=2, sequence_parallel=True), Layout(dp=2, zero=2), Layout(dp=2, zero=3)]
MORE = [Layout(micro=1), Layout(tp=2), Layout(pp=2, dp=2), Layout(dp=2, tp=2, zero=2), Layout(dp=4, micro=1, zero=3)]


def train(rank, world, keys, layout):
    """Curve, and the types of weights, gradients before the update, masters and moments."""
    engine, args, lr = build(rank, keys, layout)
    types = {"weights": {p.dtype for p in engine.params().values()}}
    engine.before_update = lambda: types.update(gradients={g.dtype for g in engine.grads().values()})
    losses, norms = [], []
    for step in range(STEPS):
        out = engine.train_batch(step_batch(step, args, engine.state), lr(step))
        losses.append(float(out.loss))
        norms.append(float(out.grad_norm))
    inner = engine.deepspeed.optimizer
    inner = getattr(inner, "optimizer", inner)
    types["masters"] = {p.dtype for p in inner.state}
    types["moments"] = {v.dtype for s in inner.state.values() for k, v in s.items() if k.startswith("exp_")}
    return losses, norms, types


@functools.cache
def in_fp32():
    losses, norms, types = run_distributed(train, 1, LLAMA, Layout())[0]
    assert types["weights"] == {torch.float32} and losses[-1] < losses[0]
    return losses, norms


@functools.cache
def in_bf16_on_one_rank():
    return run_distributed(train, 1, {**LLAMA, **BF16}, Layout())[0][:2]


def check_bf16(layout):
    for losses, norms, types in run_distributed(train, layout.world, {**LLAMA, **BF16}, layout, timeout=110):
        assert types["weights"] == {torch.bfloat16}
        assert types["gradients"] <= {torch.float32} and types["masters"] == types["moments"] == {torch.float32}
        assert losses == pytest.approx(in_fp32()[0], rel=2e-2) and norms == pytest.approx(in_fp32()[1], rel=5e-2)
        assert losses != in_fp32()[0]
        assert losses == pytest.approx(in_bf16_on_one_rank()[0], rel=5e-3)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
def test_bf16_trains_as_fp32_does(layout):
    check_bf16(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE, ids=lambda x: x.name)
def test_bf16_trains_as_fp32_does_at_more_layouts(layout):
    check_bf16(layout)


def far_from_one_rank(layout, keys):
    """How far loss and gradient norm of 20 steps are from those of one rank that has the same micro-batches."""
    ours, theirs = run_distributed(tiny.train, layout.world, keys, layout, 20, timeout=110)[0], same_on_one_rank()
    assert theirs["loss"][-1] < theirs["loss"][0]
    differences = [[abs(a - b) / b for a, b in zip(ours[x], theirs[x], strict=True)] for x in ("loss", "grad_norm")]
    return [max(values) for values in differences]


@functools.cache
def same_on_one_rank():
    return run_distributed(tiny.train, 1, {**LLAMA, **BF16}, Layout(micro=1), 20)[0]


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_bf16_on_four_data_ranks_is_the_run_of_one(zero):
    """Only the order of sums in fp32 differs; now and then it rounds a weight to the other side."""
    loss, norm = far_from_one_rank(Layout(dp=4, micro=1, zero=zero), {**LLAMA, **BF16})
    assert loss < 5e-6 and norm < 1e-4
    # Added up in bf16 it is another run.
    loss, norm = far_from_one_rank(Layout(dp=4, micro=1, zero=zero), {**LLAMA, **BF16, "fp32_allreduce": False})
    assert loss > 1e-5 and norm > 2e-4


@contextlib.contextmanager
def fp16_allowed():
    """Let DeepSpeed run fp16 on a CPU, which torch can do: what is refused is slow, not wrong."""
    kind = type(get_accelerator())
    with mock.patch.object(kind, "is_fp16_supported", lambda self: True):
        with mock.patch.object(kind, "supported_dtypes", lambda self: [torch.float32, torch.float16, torch.bfloat16]):
            yield


def fp16_keys(**changes):
    dynamic = {"enabled": True, "loss_scale": 0, "initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 1}
    return {"precision": "fp16", "fp16": {**dynamic, **changes}}


def train_fp16(rank, world, layout):
    """(loss, norm, skipped, loss scale) of eight steps, the fourth overflows; and the scale's state at the end."""
    with fp16_allowed():
        engine, args, lr = build(rank, {**LLAMA, **fp16_keys()}, layout)
    steps = []

    def overflow():
        if len(steps) == 3:
            for gradient in engine.grads().values():
                gradient.fill_(torch.inf)

    engine.before_update = overflow
    for step in range(8):
        out = engine.train_batch(step_batch(step, args, engine.state), lr(step))
        steps.append((float(out.loss), float(out.grad_norm), bool(out.skipped), out.loss_scale))
    saved = engine.scalars()
    scaler = engine.deepspeed.optimizer.loss_scaler
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis = 1.0, 0, 99, 7
    engine.load_scalars(saved)
    return steps, saved, engine.scalars()


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(pp=2, tp=2),
        pytest.param(Layout(dp=2, zero=2), marks=pytest.mark.slow),
        pytest.param(Layout(dp=2, zero=3), marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, dp=2), marks=pytest.mark.slow),
    ],
    ids=lambda x: x.name,
)
def test_fp16_with_a_dynamic_loss_scale(layout):
    for steps, saved, restored in run_distributed(train_fp16, layout.world, layout, timeout=110):
        losses, norms, skipped, scales = zip(*steps, strict=True)
        # Doubled after two good steps, halved at the overflow.
        assert scales == (1024, 1024, 2048, 1024, 1024, 1024, 2048, 2048)
        assert skipped == (False, False, False, True, False, False, False, False)
        assert losses[:4] == pytest.approx(in_fp32()[0][:4], rel=2e-3) and losses[:4] != tuple(in_fp32()[0][:4])
        assert norms[:3] == pytest.approx(in_fp32()[1][:3], rel=1e-2) and norms[3] == float("inf")
        assert saved["loss_scaler"]["last_overflow_iter"] == 3 and saved["optimizer_steps"] == 7
        assert saved["skipped_steps"] == 1 and restored == saved


def fp16_run(rank, world, keys, layout, faults):
    with fp16_allowed(), mock.patch("megatron.run.train.check_device"):
        return runs.train(rank, world, keys, layout, faults)


def run_fp16(keys, layout, faults=None):
    return run_distributed(fp16_run, layout.world, keys, layout, faults or runs.Faults(), timeout=110)


def test_fp16_runs_resume_bit_for_bit(tmp_path):
    layout = Layout(dp=2, zero=1)
    keys = {**fp16_keys(), "data_path": runs.corpus(tmp_path)}
    straight = run_fp16({**keys, "save": str(tmp_path / "a")}, layout, runs.Faults(nan_gradients=(2,)))
    again = {"load": str(tmp_path / "a"), "iteration": 3, "save": str(tmp_path / "b")}
    for before, after in zip(straight, run_fp16({**keys, **again}, layout), strict=True):
        assert after.steps == [4, 5, 6] and after.loss == before.loss[3:] and after.state == before.state
        scales = [[metrics["train/loss_scale"] for _, metrics in report.logged] for report in (before, after)]
        assert scales == [[1024, 512, 512, 512, 1024, 1024], [512, 1024, 1024]]


def test_fp16_at_the_smallest_scale_ends_with_code_4(tmp_path):
    keys = {**fp16_keys(initial_scale_power=1), "data_path": runs.corpus(tmp_path), "max_skipped_steps": 4}
    (report,) = run_fp16(keys, Layout(), runs.Faults(nan_gradients=(2, 3, 4, 5)))
    assert report.exit_code == 4 and re.search(r"\b4 updates .*loss scale 1,", report.error)


def test_fp16_on_a_cpu_is_refused(tmp_path):
    (report,) = runs.run({**fp16_keys(), "data_path": runs.corpus(tmp_path)})
    assert report.exit_code == 2 and "precision: fp16 needs a GPU; on a CPU use precision=bfloat16" in report.error
