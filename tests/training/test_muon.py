"""Muon through the engines: the same curve wherever matrices lie, in one piece or in several, and its state in
checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.mpu.random import stable_seed
from megatron.optim.matrices import held_in
from tests.distributed import run_distributed
from tests.training.models import EXPERTS
from tests.training.test_native import with_buckets
from tests.training.test_parameter_groups import _load, _save
from tests.training.tiny import LLAMA, NEOX, Layout, build, check_curve, step_batch, train, whole_state

pytestmark = pytest.mark.cpu

MUON: dict[str, Any] = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}}
MODELS: dict[str, dict[str, Any]] = {
    "neox": {**NEOX, **MUON},
    "llama": {**LLAMA, **MUON, "no_weight_tying": True},
    "groups": {
        **LLAMA,
        "optimizer": {"type": "Muon", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "split_qkv": "groups"}},
    },
    "moe": {**LLAMA, **EXPERTS, **MUON, "moe_layers": ["dense", "moe"]},
}
STEPS = 20


@functools.cache
def _alone(model: str) -> dict[str, list[float]]:
    return run_distributed(train, 1, MODELS[model], Layout(micro=8), STEPS)[0]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("neox", Layout(tp=2, sequence_parallel=True)),
        ("llama", Layout(pp=2)),
        ("llama", Layout(dp=2, tp=2, engine="native")),
        ("moe", Layout(dp=2, ep=2)),
        ("groups", Layout(tp=2)),
        pytest.param("llama", Layout(dp=2, engine="native"), marks=pytest.mark.full),
        pytest.param("moe", Layout(tp=2, dp=2, micro=1, engine="native"), marks=pytest.mark.full),
        pytest.param("neox", Layout(pp=2, dp=2, micro=1), marks=pytest.mark.full),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_the_curve_is_the_same_at_every_layout(model: str, layout: Layout) -> None:
    check_curve(_alone(model), MODELS[model], layout, STEPS)


SINGULAR = (3.4445, -4.7750, 2.0315)


def _by_singular_values(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The iteration on the singular values alone, in fp64: it leaves the singular vectors as they are."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    a, b, c = SINGULAR
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


ROWS = {"matrices": [32, 16, 16], "groups": [16, 16, *4 * [8]], "heads": 8 * [8]}


def _pieces(name: str, x: torch.Tensor, qkv: str) -> tuple[torch.Tensor, ...]:
    """The matrices that a parameter of llama's is made of: q, k, v of 4, 2 and 2 heads of 8; up and gate of 48."""
    if "query_key_value" in name:
        return x.split(ROWS[qkv])
    return x.split([48, 48]) if "linear1" in name else (x,)


def _beside_formula(rank: int, world: int, adjust: str, qkv: str) -> dict[str, float]:
    """Largest difference of a weight after some steps from the formula in fp64 on the same gradients, by name."""
    params = {"lr": 1e-2, "momentum": 0.9, "adjust_lr_fn": adjust, "split_qkv": qkv, "betas": [0.9, 0.95]}
    keys = {**MODELS["llama"], "optimizer": {"type": "Muon", "params": params}, "gradient_clipping": 0.0}
    engine, args, lr = build(rank, keys, Layout())
    weights = {name: p.detach().double() for name, p in engine.params().items()}
    rest = {n: torch.nn.Parameter(w.clone()) for n, w in weights.items() if not _is_muon(n)}
    decays = [n for n in rest if n.endswith(("word_embeddings.weight", "final_linear.weight"))]
    adamw = torch.optim.AdamW(
        [
            {"params": [rest[n] for n in decays], "weight_decay": 0.1},
            {"params": [rest[n] for n in rest if n not in decays], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    momenta = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in range(4):
        found: dict[str, torch.Tensor] = {}
        engine.before_update = lambda found=found: found.update({n: g.double() for n, g in engine.grads().items()})
        engine.train_batch(step_batch(step, args, engine.state), lr(step))
        for name, g in found.items():
            if name in rest:
                rest[name].grad = g
                continue
            momenta[name] = 0.9 * momenta[name] + 0.1 * g
            made = []
            for x in _pieces(name, 0.9 * momenta[name] + 0.1 * g, qkv):
                m, n = x.shape
                factor = 0.2 * max(m, n) ** 0.5 if adjust == "match_rms_adamw" else max(1, m / n) ** 0.5
                made.append(_by_singular_values(x, 5) * factor)
            weights[name] = weights[name] * (1 - lr(step) * 0.1) - lr(step) * torch.cat(made)
        for group in adamw.param_groups:
            group["lr"] = lr(step)
        adamw.step()
    weights |= {name: w.detach() for name, w in rest.items()}
    return {name: float((p.detach() - weights[name]).abs().max()) for name, p in engine.params().items()}


def _is_muon(name: str) -> bool:
    """Whether this parameter of llama's is one or several matrices inside the blocks."""
    return name.startswith(("2.", "3.")) and name.endswith(".weight") and "norm" not in name


@pytest.mark.parametrize(
    ("adjust", "qkv"), [("match_rms_adamw", "matrices"), ("original", "groups"), ("match_rms_adamw", "heads")]
)
def test_matrices_move_by_the_published_formula_and_the_rest_by_adamw(adjust: str, qkv: str) -> None:
    (differences,) = run_distributed(_beside_formula, 1, adjust, qkv)
    assert sum(map(_is_muon, differences)) == 8
    assert max(differences.values()) < 3e-6  # of weights that moved by 1e-2


def _in_bf16(rank: int, world: int, layout: Layout) -> tuple[dict[str, torch.Tensor], int]:
    """(By how much the masters of all matrices move in a step, how many of them lie in pieces) with small buckets, of
    which some have a border inside a matrix."""
    keys = {**MODELS["llama"], "precision": "bfloat16", "warmup": 0.0, "weight_decay": 0.0}
    with with_buckets(layout, 3000):
        engine, args, _ = build(rank, keys, layout)
    groups = engine._optimizer_state._inner.param_groups
    held = [one for g in groups if g["matrices"] for tensor in g["params"] for one in held_in(tensor)]
    before = whole_state(engine)

    def same_gradients() -> None:
        """Those of bf16 passes differ by their rounding, which orthogonalising makes larger."""
        for name, gradient in engine.grads().items():
            generator = torch.Generator().manual_seed(stable_seed(name))
            share = engine.share(name)
            gradient.view(-1).copy_(
                torch.randn(engine.params()[name].numel(), generator=generator)[share.start : share.stop]
            )

    engine.before_update = same_gradients
    engine.train_batch(step_batch(0, args, engine.state), 0.01)
    moved = {n: values["weight"] - before[n]["weight"] for n, values in whole_state(engine).items() if _is_muon(n)}
    return moved, sum(0 < len(one.mine) < one.parameter.numel() for one in held)


def test_buckets_of_both_engines_move_matrices_alike_in_bf16() -> None:
    alone, cut = run_distributed(_in_bf16, 1, Layout(micro=4, zero=1))[0]
    assert cut == 0
    for layout in (Layout(dp=2, zero=1), Layout(dp=2, engine="native")):
        for moved, cut in run_distributed(_in_bf16, 2, layout):
            assert cut > 0
            for name, expected in alone.items():
                assert (moved[name] - expected).norm() < 0.01 * expected.norm(), name


def _skips(rank: int, world: int, layout: Layout) -> tuple[float, dict[str, set[str]]]:
    """(Largest change of weights and momenta in a step whose gradient is not finite, what is kept of each)."""
    engine, args, lr = build(rank, MODELS["llama"], layout)
    engine.train_batch(step_batch(0, args, engine.state), lr(0))
    before = whole_state(engine)

    def spoil() -> None:
        for gradient in engine.grads().values():
            gradient.view(-1)[:1] = torch.nan

    engine.before_update = spoil
    engine.train_batch(step_batch(1, args, engine.state), lr(1))
    after = whole_state(engine)
    moved = max(float((after[n][k] - v).abs().max()) for n, vs in before.items() for k, v in vs.items())
    assert engine.scalars()["optimizer_steps"] == 1
    return moved, {name: set(values) for name, values in after.items()}


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, engine="native")], ids=lambda x: x.name)
def test_a_step_that_is_not_finite_moves_nothing(layout: Layout) -> None:
    for moved, kept in run_distributed(_skips, layout.world, layout):
        assert moved == 0
        for name, keys in kept.items():
            assert keys - {"weight"} == ({"momentum_buffer"} if _is_muon(name) else {"exp_avg", "exp_avg_sq"}), name


def test_its_state_resumes_bit_for_bit_and_at_another_layout(tmp_path: Path) -> None:
    saved = Layout(dp=2, engine="native")
    curve, _ = run_distributed(_save, 2, MODELS["llama"], saved, str(tmp_path))[0]
    same, _, _ = run_distributed(_load, 2, MODELS["llama"], saved, str(tmp_path))[0]
    assert same == curve
    for other in (Layout(pp=2), Layout(tp=2)):
        moved, _, told = run_distributed(_load, 2, MODELS["llama"], other, str(tmp_path))[0]
        assert moved == pytest.approx(curve, rel=1e-5) and not any("thawed" in line for line in told)
