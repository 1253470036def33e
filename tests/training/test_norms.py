"""`log_grad_norm` and `log_param_norm`: the norm of each whole parameter, the same at every layout."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from tests.distributed import run_distributed
from tests.training.runs import corpus, run
from tests.training.tiny import LLAMA, NEOX, Layout, build, step_batch

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
        seen["gradients"] = {name: float(norm) for name, norm in engine.grad_norms().items()}
        if world == 1:
            seen["by hand"] = {name: float(g.double().square().sum().sqrt()) for name, g in engine.grads().items()}

    before = {name: float(norm) for name, norm in engine.param_norms().items()}
    if world == 1:
        seen["weights by hand"] = {n: float(p.double().square().sum().sqrt()) for n, p in engine.params().items()}
    engine.before_update = look
    out = engine.train_batch(step_batch(0, args, engine.state), lr(0))
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
