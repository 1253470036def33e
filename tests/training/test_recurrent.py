"""Training what keeps a state (Mamba, RWKV) and hybrids: the same curve at any layout and recomputation; what stands in
exponents stays in fp32."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.training.tiny import LLAMA, NEOX, Layout, build, step_batch

pytestmark = pytest.mark.cpu

STEPS = 4
STATES: dict[str, Any] = {
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-5,
    "no_weight_tying": True,
    "mamba_d_state": 8,
    "mamba_head_dim": 8,
    "mamba_use_bias_in_linears": True,
    "init_method_std": 0.1,
}
MAMBA = {**NEOX, **STATES, "attention_config": [[["mamba"], "all"]], "pos_emb": "none"}
MAMBA2 = {**NEOX, **STATES, "attention_config": [[["mamba2"], "all"]], "pos_emb": "none"}
MAMBA_HYBRID = {**LLAMA, **STATES, "attention_config": [[["mamba2", "global"], "all"]], "mamba_n_groups": 2}
RWKV: dict[str, Any] = {
    **NEOX,
    "attention_config": [[["rwkv4"], "all"]],
    "pos_emb": "none",
    "norm": "layernorm",
    "gpt_j_residual": False,
    "ffn_dim": 72,
    "init_method_std": 0.1,
}
RWKV_HYBRID = {
    **RWKV,
    "attention_config": [[["rwkv4", "global"], "all"]],
    "pos_emb": "rotary",
    "no_weight_tying": False,
}
RWKV6 = {**RWKV, "attention_config": [[["rwkv"], "all"]], "head_size": 8}
MODELS = {
    "mamba": MAMBA,
    "mamba2": MAMBA2,
    "mamba hybrid": MAMBA_HYBRID,
    "rwkv4": RWKV,
    "rwkv4 hybrid": RWKV_HYBRID,
    "rwkv6": RWKV6,
}


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
        for name in (name for name, dtype in types.items() if dtype == torch.float32):
            assert torch.equal(engine.read(name)["weight"], engine.params()[name]), name  # the master itself
    return losses, norms, types


@functools.cache
def alone(name: str, precision: str = "fp32") -> tuple[list[float], list[float], dict[str, Any]]:
    keys = MODELS[name] if precision == "fp32" else {**MODELS[name], "precision": precision}
    return run_distributed(train, 1, keys, Layout())[0]


LAYOUTS = [
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(dp=2, zero=2),
    Layout(dp=2, zero=3),
    Layout(pp=2, tp=2, sequence_parallel=True),
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
def test_the_curve_does_not_depend_on_the_layout(name: str, layout: Layout) -> None:
    expected = alone(name)
    for losses, norms, _ in run_distributed(train, layout.world, MODELS[name], layout, timeout=110):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert norms == pytest.approx(expected[1], rel=2e-5)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputation_changes_nothing(name: str, policy: str) -> None:
    found = run_distributed(train, 1, {**MODELS[name], "checkpoint_policy": policy}, Layout())[0]
    assert found[:2] == alone(name)[:2]


HALF = [Layout(), Layout(dp=2), Layout(dp=2, zero=2), Layout(pp=2), Layout(tp=2, sequence_parallel=True)]
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
    keys = {**MAMBA, "precision": "bfloat16", **changes}
    for losses, _, types in run_distributed(train, layout.world, keys, layout, timeout=110):
        assert set(types.values()) == {torch.bfloat16}
        assert losses == pytest.approx(alone("mamba")[0], rel=2e-2)
