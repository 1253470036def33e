"""bf16 and fp16: masters and accumulation in fp32, the curve of fp32 within rounding, the dynamic loss scale."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.distributed import run_distributed
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
