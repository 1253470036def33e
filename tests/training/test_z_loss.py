"""The z-loss of a run: the same curve and the same metric at every layout, and that of the model's logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.callbacks.z_loss import ZLossLog
from megatron.layers.carry import Carry
from megatron.neox_arguments.batch_plan import BatchPlan
from tests.distributed import run_distributed
from tests.training.tiny import LLAMA, Layout, build, step_batch

pytestmark = pytest.mark.cpu

WEIGHT, STEPS = 0.3, 3
GROWING = {**LLAMA, "batch_size_schedule": [[0, 4], [1, 8]]}
Z = {**GROWING, "z_loss_weight": WEIGHT}
ONE = Layout(micro=4)
LAYOUTS = (Layout(dp=2, zero=1), Layout(tp=2, micro=1), Layout(pp=2, micro=1), Layout(dp=2, engine="native", zero=1))


def _curve(rank: int, keys: dict[str, Any], layout: Layout) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, z-loss) of each step."""
    engine, args, lr = build(rank, keys, layout)
    log = ZLossLog(1, layout.micro * layout.dp)
    trainer: Any = SimpleNamespace(engine=engine, state=engine.state, plan=BatchPlan.of(args), step=0, metrics={})
    log.loaded(trainer)
    found = []
    for step in range(STEPS):
        batch = step_batch(step, args, engine.state)
        engine.eval_batch(batch)  # does not count
        out = engine.train_batch(batch, lr(step))
        trainer.step = step + 1
        log.after_step(trainer, out)
        found.append((float(out.loss), float(out.grad_norm), float(trainer.metrics.get("train/z_loss", 0.0))))
    return found


def _by_logits(rank: int) -> float:
    """z_loss_weight times the mean of logsumexp² over the trained tokens of the first step, from logits, in fp64."""
    engine, args, _ = build(rank, Z, ONE)
    batch = step_batch(0, args, engine.state)
    total = count = 0.0
    with engine.evaluating():
        for tokens, positions, mask in zip(batch.tokens, batch.positions, batch.mask, strict=True):
            logits = engine.run_stage(Carry(tokens, positions), None, lambda out: out.logits())
            squares = torch.logsumexp(logits.double(), -1).square()
            total, count = total + float((squares * mask).sum()), count + float(mask.sum())
    return WEIGHT * total / count


def _single(rank: int, world: int) -> tuple[Any, Any, float]:
    return _curve(rank, Z, ONE), _curve(rank, GROWING, ONE), _by_logits(rank)


def _others(rank: int, world: int) -> list[Any]:
    return [_curve(rank, Z, layout) for layout in LAYOUTS]


def test_the_z_loss_of_a_run() -> None:
    ((alone, without, by_logits),) = run_distributed(_single, 1, timeout=120)
    assert alone[0][2] == pytest.approx(by_logits, rel=1e-5)
    assert alone[0][0] == without[0][0]  # what is reported is the cross entropy
    assert abs(alone[0][1] / without[0][1] - 1) > 0.01 and without[0][2] == 0.0  # its gradient counts
    for curves in run_distributed(_others, 2, timeout=120):
        for layout, curve in zip(LAYOUTS, curves, strict=True):
            for found, expected in zip(curve, alone, strict=True):
                assert found == pytest.approx(expected, rel=1e-5), layout.name
