"""Sophia through the engines: its estimate of the curvature and its update against the formulas, the same curve
wherever samples, layers and the vocabulary lie, and its state in checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.mpu.sampled_targets import draws
from tests.distributed import run_distributed
from tests.training.test_parameter_groups import _load, _save
from tests.training.tiny import LLAMA, NEOX, VOCAB, Layout, build, check_curve, step_batch, train, whole_state

pytestmark = pytest.mark.cpu

EVERY = 2
SOPHIA: dict[str, Any] = {
    "optimizer": {"type": "Sophia", "params": {"lr": 1e-3, "rho": 0.04, "hessian_interval": EVERY}}
}
MODELS: dict[str, dict[str, Any]] = {"neox": {**NEOX, **SOPHIA}, "llama": {**LLAMA, **SOPHIA}}
STEPS = 20


def _estimate(engine: Any, batch: Any) -> dict[str, torch.Tensor]:
    """B g'², g' the gradient of the mean loss of B tokens whose targets are drawn by inverse of the cumulative
    distribution, by torch alone."""
    total, count = torch.zeros(()), 0.0
    for tokens, positions, mask, drawn in zip(
        batch.tokens, batch.positions, batch.mask, draws(batch.tokens, batch.step), strict=True
    ):
        logits = engine.module((tokens, positions), then=lambda out: out.logits()).view(-1, VOCAB)
        reached = logits.detach().double().softmax(-1).cumsum(-1)
        targets = (reached <= drawn.view(-1, 1).double()).sum(-1).clamp(max=VOCAB - 1)
        total = total + (cross_entropy(logits, targets, reduction="none") * mask.view(-1)).sum()
        count += float(mask.sum())
    params = engine.params()
    gradients = torch.autograd.grad(total / count, list(params.values()))
    return {name: count * g.double() ** 2 for name, g in zip(params, gradients, strict=True)}


def _beside_formula(rank: int, world: int) -> tuple[float, float]:
    """(Largest relative difference of h, largest difference of a weight) from the formulas in fp64."""
    engine, args, lr = build(rank, {**MODELS["llama"], "gradient_clipping": 0.0}, Layout(micro=4))
    weights = {name: p.detach().double() for name, p in engine.params().items()}
    momenta, hessians = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    off = 0.0
    for step in range(4):
        batch = step_batch(step, args, engine.state)
        if step % EVERY == 0:
            hessians = {n: 0.99 * hessians[n] + 0.01 * found for n, found in _estimate(engine, batch).items()}
        gradients: dict[str, torch.Tensor] = {}
        engine.before_update = lambda found=gradients: found.update({n: g.double() for n, g in engine.grads().items()})
        engine.train_batch(batch, lr(step))
        ours = whole_state(engine)
        for name, g in gradients.items():
            h = ours[name]["hessian"].double()
            off = max(off, float((h - hessians[name]).abs().max() / hessians[name].abs().max()))
            momenta[name] = 0.965 * momenta[name] + 0.035 * g
            decay = 0.1 if weights[name].ndim > 1 else 0.0
            move = (momenta[name] / (0.04 * h).clamp(min=1e-12)).clamp(-1, 1)
            weights[name] = weights[name] * (1 - lr(step) * decay) - lr(step) * move
    found = engine.params()
    return off, max(float((found[name].detach() - w).abs().max()) for name, w in weights.items())


def test_curvature_and_update_are_those_of_the_formulas() -> None:
    curvature, weights = run_distributed(_beside_formula, 1)[0]
    assert curvature < 1e-4 and weights < 1e-6


@functools.cache
def _alone(model: str) -> dict[str, list[float]]:
    return run_distributed(train, 1, MODELS[model], Layout(micro=8), STEPS)[0]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("neox", Layout(tp=2, sequence_parallel=True)),
        ("llama", Layout(pp=2)),
        ("llama", Layout(dp=2, zero=3)),
        ("neox", Layout(dp=2, micro=1, engine="native")),
        pytest.param("llama", Layout(dp=2, zero=2), marks=pytest.mark.full),
        pytest.param("llama", Layout(pp=2, tp=2), marks=pytest.mark.full),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_the_curve_is_the_same_at_every_layout(model: str, layout: Layout) -> None:
    check_curve(_alone(model), MODELS[model], layout, STEPS)


def test_its_state_resumes_bit_for_bit_and_at_another_layout(tmp_path: Path) -> None:
    saved = Layout(dp=2, engine="native")
    curve, kept = run_distributed(_save, 2, MODELS["llama"], saved, str(tmp_path))[0]
    assert all(keys == {"weight", "exp_avg", "hessian"} for keys in kept.values())
    same, _, _ = run_distributed(_load, 2, MODELS["llama"], saved, str(tmp_path))[0]
    assert same == curve
    for other in (Layout(pp=2), Layout(tp=2)):
        moved, _, _ = run_distributed(_load, 2, MODELS["llama"], other, str(tmp_path))[0]
        assert moved == pytest.approx(curve, rel=1e-5)
