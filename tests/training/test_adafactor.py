"""Adafactor through the engines against torch's in fp64, at layouts that cut matrices in every way, and its rows and
columns in checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.mpu.random import stable_seed
from tests.distributed import run_distributed
from tests.training.test_native import with_buckets
from tests.training.test_parameter_groups import _load, _save
from tests.training.tiny import LLAMA, NEOX, Layout, build, check_curve, step_batch, train, whole_state

pytestmark = pytest.mark.cpu

ADAFACTOR: dict[str, Any] = {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2, "d": 1.0}}, "min_lr": 1e-3}
MODELS: dict[str, dict[str, Any]] = {"neox": {**NEOX, **ADAFACTOR}, "llama": {**LLAMA, **ADAFACTOR}}
STEPS = 20


def _beside_torch(rank: int, world: int) -> tuple[dict[str, float], float]:
    """(Largest difference of a weight after some steps from torch's on the same gradients in fp64, by name; by how much
    weights moved)."""
    engine, args, lr = build(rank, {**MODELS["neox"], "gradient_clipping": 0.0}, Layout())
    theirs = {name: torch.nn.Parameter(p.detach().double()) for name, p in engine.params().items()}
    size = {name: len(p) if "embed" not in name and "final_linear" not in name else 67 for name, p in theirs.items()}
    theirs = {name: torch.nn.Parameter(p.detach()[: size[name]]) for name, p in theirs.items()}  # without padding
    before = {name: p.detach().clone() for name, p in theirs.items()}
    decays = [name for name, p in theirs.items() if p.ndim > 1]
    rest = [name for name in theirs if name not in decays]
    groups = [
        {"params": [theirs[n] for n in names], "weight_decay": decay} for names, decay in ((decays, 0.1), (rest, 0.0))
    ]
    reference = torch.optim.Adafactor(groups, eps=(torch.finfo(torch.float32).eps, 1e-3))
    for step in range(6):
        found: dict[str, torch.Tensor] = {}
        engine.before_update = lambda found=found: found.update({n: g.double() for n, g in engine.grads().items()})
        engine.train_batch(step_batch(step, args, engine.state), lr(step))
        for name, gradient in found.items():
            theirs[name].grad = gradient[: size[name]]
        for group in reference.param_groups:
            group["lr"] = lr(step)
        reference.step()
    moved = max(float((p.detach() - before[name]).abs().max()) for name, p in theirs.items())
    ours = engine.params()
    return {n: float((ours[n].detach()[: size[n]] - theirs[n]).abs().max()) for n in ours}, moved


def test_it_is_torchs() -> None:
    differences, moved = run_distributed(_beside_torch, 1)[0]
    assert max(differences.values()) < 5e-7 and moved > 5e-3


@functools.cache
def _alone(model: str) -> dict[str, list[float]]:
    return run_distributed(train, 1, MODELS[model], Layout(), STEPS)[0]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("neox", Layout(tp=2, sequence_parallel=True)),
        ("llama", Layout(pp=2)),
        ("llama", Layout(dp=2, tp=2, engine="native")),
        pytest.param("neox", Layout(dp=2), marks=pytest.mark.full),
        pytest.param("llama", Layout(pp=2, tp=2), marks=pytest.mark.full),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_the_curve_is_the_same_at_every_layout(model: str, layout: Layout) -> None:
    check_curve(_alone(model), MODELS[model], layout, STEPS)


def _in_bf16(rank: int, world: int, layout: Layout) -> dict[str, dict[str, torch.Tensor]]:
    """Masters and what is kept after two steps on given gradients, with small buckets, of which some have a border
    inside a matrix."""
    with with_buckets(layout, 3000):
        engine, args, _ = build(rank, {**MODELS["llama"], "precision": "bfloat16"}, layout)

    def same_gradients() -> None:
        for name, gradient in engine.grads().items():
            generator = torch.Generator().manual_seed(stable_seed(name))
            share, p = engine.share(name), engine.params()[name]
            values = torch.randn(p.shape, generator=generator)
            values[p.spec.shape[0] :] = 0.0  # padding
            gradient.view(-1).copy_(values.view(-1)[share.start : share.stop])

    engine.before_update = same_gradients
    for step in range(2):
        engine.train_batch(step_batch(step, args, engine.state), 0.01)
    return whole_state(engine)


def test_buckets_of_both_engines_move_parts_of_matrices_alike_in_bf16() -> None:
    alone = run_distributed(_in_bf16, 1, Layout(micro=4, zero=1))[0]
    assert {key for values in alone.values() for key in values} == {
        "weight", "variance", "whole.row_var", "whole.col_var"
    }  # fmt: skip
    for layout in (Layout(dp=2, zero=1), Layout(dp=2, engine="native")):
        for state in run_distributed(_in_bf16, 2, layout):
            for name, values in alone.items():
                for key, value in values.items():
                    assert (state[name][key] - value).abs().max() < 1e-5 * value.abs().max(), (name, key)


@pytest.mark.parametrize("saved", [Layout(dp=2, engine="native"), Layout(tp=2)], ids=lambda x: x.name)
def test_its_state_resumes_bit_for_bit_and_at_another_layout(saved: Layout, tmp_path: Path) -> None:
    curve, _ = run_distributed(_save, 2, MODELS["llama"], saved, str(tmp_path))[0]
    same, _, _ = run_distributed(_load, 2, MODELS["llama"], saved, str(tmp_path))[0]
    assert same == curve
    for other in (Layout(pp=2), Layout(tp=2) if saved.dp > 1 else Layout(dp=2)):
        moved, _, told = run_distributed(_load, 2, MODELS["llama"], other, str(tmp_path))[0]
        assert moved == pytest.approx(curve, rel=1e-5) and not any("thawed" in line for line in told)
