"""`log_grad_norm` and `log_param_norm`: the norm of each whole parameter, the same at every layout."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pytest
import torch

from megatron.callbacks.gradient_noise import GradientNoise
from tests.distributed import run_distributed
from tests.training.models import LLAMA, NEOX
from tests.training.runs import corpus, run
from tests.training.tiny import BATCH, Layout, build, step_batch

pytestmark = pytest.mark.cpu

LAYOUTS = [
    ("llama", Layout(pp=2, tp=2, sequence_parallel=True), {}),  # a tied weight on two stages
    ("neox", Layout(dp=2, zero=1), {}),
    ("neox", Layout(dp=2, zero=3), {}),
    ("llama", Layout(dp=2), {"precision": "bfloat16"}),
]
MODELS = {"neox": NEOX, "llama": LLAMA}


def norms(rank, world, keys, layout):
    """Norms of gradients and weights around the first step, by the engine and, where that is plain, by hand."""
    engine, args, lr = build(rank, keys, layout)
    seen = {}

    def look():
        seen["ratios"] = engine.update_ratios()
        seen["gradients"] = {name: float(norm) for name, norm in engine.grad_norms().items()}
        if world == 1:
            seen["by hand"] = {name: float(g.double().square().sum().sqrt()) for name, g in engine.grads().items()}

    before = {name: float(norm) for name, norm in engine.param_norms().items()}
    if world == 1:
        seen["weights by hand"] = {n: float(p.double().square().sum().sqrt()) for n, p in engine.params().items()}
    old = {n: p.detach().double() for n, p in engine.params().items()}
    engine.before_update = look
    out = engine.train_batch(step_batch(0, args, engine.state), lr(0))
    seen["ratios"] = {name: float(ratio) for name, ratio in seen["ratios"]().items()}
    if world == 1:
        weights = {n: p.detach().double() for n, p in engine.params().items()}
        seen["ratios by hand"] = {n: float((p - old[n]).norm() / p.norm()) for n, p in weights.items()}
    broken = [engine.not_finite()]
    if layout.dp == 2 and rank == 1:  # the last weight that this rank holds of one
        weight = engine.params()["3.mlp.linear1.weight"]
        with torch.no_grad():
            getattr(weight, "ds_tensor", weight).view(-1)[-1] = math.nan
    broken.append(engine.not_finite())
    return {**seen, "broken": broken, "weights": before, "global": float(out.grad_norm)}


@functools.cache
def reference(model):
    return run_distributed(norms, 1, MODELS[model], Layout(micro=8))[0]


@pytest.mark.parametrize("model", MODELS)
def test_on_one_rank_they_are_the_norms_of_the_tensors(model):
    ours = reference(model)
    assert ours["gradients"] == pytest.approx(ours["by hand"], rel=1e-5)
    assert ours["weights"] == pytest.approx(ours["weights by hand"], rel=1e-5)
    assert ours["ratios"] == pytest.approx(ours["ratios by hand"], rel=1e-4) and all(ours["ratios"].values())
    assert math.hypot(*ours["gradients"].values()) == pytest.approx(ours["global"], rel=1e-5)


@pytest.mark.parametrize(("model", "layout", "keys"), LAYOUTS, ids=str)
def test_every_layout_has_the_same_norms(model, layout, keys):
    ours, tolerance = reference(model), 3e-2 if keys else 1e-4
    reports = run_distributed(norms, layout.world, {**MODELS[model], **keys}, layout, timeout=110)
    for rank, report in enumerate(reports):
        assert report["broken"] == [[], ["3.mlp.linear1.weight"] if layout.dp == 2 and rank == 1 else []]
        assert report["gradients"].keys() == ours["gradients"].keys()
        assert report["gradients"] == pytest.approx(ours["gradients"], rel=tolerance)
        assert report["weights"] == pytest.approx(ours["weights"], rel=tolerance / 10)
        assert report["ratios"] == pytest.approx(ours["ratios"], rel=tolerance)
        assert math.hypot(*report["gradients"].values()) == pytest.approx(report["global"], rel=1e-5)


def test_the_keys_put_them_into_the_log(tmp_path):
    keys = {"data_path": corpus(tmp_path), "train_iters": 2, "log_interval": 2}
    for gradients, parameters in ((False, False), (True, False), (False, True)):
        report = run({**keys, "log_grad_norm": gradients, "log_param_norm": parameters}, Layout(pp=2))[0]
        ((step, metrics),) = report.logged
        assert step == 2
        assert ("gradient_norms/3.mlp.linear1.weight" in metrics) == gradients
        assert ("parameter_norms/3.mlp.linear1.weight" in metrics) == parameters
        if gradients:
            squares = sum(value**2 for name, value in metrics.items() if name.startswith("gradient_norms/"))
            assert math.sqrt(squares) == pytest.approx(report.grad_norm[1], rel=1e-5)


def test_monitored_parameters_are_logged_at_their_steps(tmp_path):
    keys = {
        "data_path": corpus(tmp_path),
        "train_iters": 4,
        "monitor_interval": 2,
        "monitor_parameters": ["3.mlp.*.weight"],
    }
    report = run(keys, Layout(pp=2))[0]
    found = [sorted(name for name in metrics if "/3.mlp" in name or "/2." in name) for _, metrics in report.logged]
    weights = [f"3.mlp.linear{i}.weight" for i in (1, 2)]
    kinds = ("gradient_norms", "parameter_norms", "update_ratios")
    assert found == [[], expected := [f"{kind}/{name}" for kind in kinds for name in weights], [], expected]
    report = run({**keys, "monitor_parameters": ["3.mpl.*"]})[0]
    assert report.exit_code == 2 and "monitor_parameters: '3.mpl.*' matches no" in report.error


def noise(rank, world, keys, layout):
    """The noise scale of two estimates of three steps each, and where all of a gradient is here, by hand.

    Between them are two that do not come about: a step of each has nothing to train on."""
    engine, args, lr = build(rank, keys, layout)
    plan = SimpleNamespace(batch_size=lambda step: BATCH)
    trainer = SimpleNamespace(engine=engine, state=engine.state, args=args, plan=plan, step=0, metrics={})
    monitor, whole = GradientNoise(3), []
    monitor.loaded(trainer)

    def look():
        monitor.before_update(trainer)
        if world == 1:
            whole.append(torch.cat([g.double().flatten() for g in engine.grads().values()]))

    engine.before_update = look
    for step in range(12):
        batch = step_batch(step, args, engine.state)
        if step in (5, 7):
            batch = batch.untrained()
        out = engine.train_batch(batch, lr(step))
        trainer.step += 1
        monitor.after_step(trainer, out)
    means = torch.zeros(2, dtype=torch.float64)
    for three in (whole[:3], whole[7:]) if whole else ():
        # From the definition: the unbiased variance of the gradient of a step is tr(S) / B.
        of_step = torch.stack(three).var(dim=0, unbiased=True).sum()
        square = sum(three).div(3).square().sum() - of_step / 3
        means = 0.9 * means + 0.1 * torch.stack([square, of_step * BATCH])
    return float(trainer.metrics["gradient_noise_scale"]), float(means[1] / means[0])


def test_the_gradient_noise_scale_is_that_of_the_gradients_at_every_layout():
    keys = {**LLAMA, "log_interval": 12}
    ((ours, by_hand),) = run_distributed(noise, 1, keys, Layout(micro=8))
    assert ours == pytest.approx(by_hand, rel=1e-4)
    for layout in (Layout(pp=2, tp=2), Layout(dp=2, zero=1), Layout(dp=2, engine="native")):
        assert [one for one, _ in run_distributed(noise, layout.world, keys, layout)] == pytest.approx(
            [ours] * layout.world, rel=1e-3
        )
