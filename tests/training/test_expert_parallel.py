"""Expert parallelism changes no number: the same curve at any ep x tp x pp, micro-batch and recomputation.

The reference is one rank with one micro-batch, which tests/layers/test_moe* hold against plain formulas.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.callbacks.replica_check import ReplicaCheck
from megatron.errors import NumericsError
from megatron.mpu.exchange import Exchange
from megatron.mpu.state import ParallelState
from megatron.training.compile import compile_blocks
from tests.distributed import run_distributed
from tests.training import models, runs
from tests.training.tiny import Layout, build, step_batch, whole_state

pytestmark = pytest.mark.cpu

STEPS = 20
MODELS = {"llama": models.MODELS["moe"], "neox": models.MODELS["moe-all"], "documents": models.MODELS["moe-documents"]}
RECOMPUTED = {"checkpoint_activations": True}


def train(rank: int, world: int, keys: dict[str, Any], layout: Layout, steps: int) -> dict[str, Any]:
    """The curve, what every weight and moment is in the end (its squared sum), and how rows travelled."""
    engine, args, lr = build(rank, keys, layout)
    curve: dict[str, Any] = {"loss": [], "grad_norm": [], "least": [], "sent": []}
    plan = Exchange.plan.__func__

    def watched(cls: Any, counts: torch.Tensor, state: ParallelState) -> Exchange:
        found = plan(cls, counts, state)
        curve["least"].append(int(found.counts.min()))
        curve["sent"].extend(found.send)
        return found

    with mock.patch.object(Exchange, "plan", classmethod(watched)):
        for step in range(steps):
            out = engine.train_batch(step_batch(step, args, engine.state), lr(step))
            curve["loss"].append(float(out.loss))
            curve["grad_norm"].append(float(out.grad_norm))
        evaluated = engine.eval_batch(step_batch(99, args, engine.state))
    curve["eval"] = [evaluated.loss]
    curve["state"] = {
        f"{name}/{key}": float(value.double().square().sum())
        for name, values in whole_state(engine).items()
        for key, value in values.items()
    }
    return curve


@functools.cache
def one_rank(model: str, micro: int = 8) -> dict[str, Any]:
    return run_distributed(train, 1, MODELS[model], Layout(micro=micro), STEPS)[0]


def noise_floor(model: str) -> float:
    """How far reordered sums alone move the norm: the same run in other micro-batches, on one rank."""
    pairs = zip(one_rank(model, 1)["grad_norm"], one_rank(model)["grad_norm"], strict=True)
    return max(abs(a - b) / b for a, b in pairs)


def assert_same(model: str, layout: Layout, curves: list[dict[str, Any]]) -> None:
    ours = one_rank(model)
    assert ours["loss"][-1] < ours["loss"][0], "the reference does not learn"
    assert max(ours["grad_norm"]) > MODELS[model]["gradient_clipping"], "the clip is never active"
    tolerance = max(1e-5, 10 * noise_floor(model))
    for rank, curve in enumerate(curves):
        where, steps = f"{layout.name} rank {rank}", len(curve["loss"])
        assert curve["loss"] == pytest.approx(ours["loss"][:steps], rel=1e-5), where
        assert curve["grad_norm"] == pytest.approx(ours["grad_norm"][:steps], rel=tolerance), where
        if steps < STEPS:
            continue
        assert curve["eval"] == pytest.approx(ours["eval"], rel=1e-5), where
        if layout.tp == 1:
            for name, value in curve["state"].items():
                assert value == pytest.approx(ours["state"][name], rel=1e-3), f"{where} {name}"


COVERING = [
    ("llama", Layout(dp=2, ep=2), {}),
    ("llama", Layout(dp=4, ep=2, micro=1), {}),
    ("llama", Layout(dp=2, tp=2, ep=2, sequence_parallel=True), RECOMPUTED),
    ("neox", Layout(dp=4, ep=4, micro=1), RECOMPUTED),
    ("neox", Layout(dp=2, tp=2, ep=2), {}),
    ("neox", Layout(pp=2, dp=2, ep=2, micro=1), {}),
    ("llama", Layout(pp=2, dp=2, ep=2), RECOMPUTED),
    ("documents", Layout(dp=2, ep=2, micro=4), {}),
    ("llama", Layout(dp=4, ep=2, micro=1, engine="native"), {}),
    ("neox", Layout(dp=2, tp=2, ep=2, engine="native"), RECOMPUTED),
]
MORE = [
    ("llama", Layout(pp=2, dp=2, tp=2, ep=2, sequence_parallel=True), {}),
    ("neox", Layout(pp=2, dp=2, tp=2, ep=2, micro=1), RECOMPUTED),
    ("documents", Layout(dp=4, tp=2, ep=4, micro=1), {}),
    ("documents", Layout(pp=2, dp=2, ep=2, micro=1), {}),
    ("llama", Layout(dp=2, tp=2, micro=4), {}),
    ("neox", Layout(dp=2, zero=1), {}),
    ("neox", Layout(dp=4, ep=4, micro=1, engine="native"), {}),
    ("documents", Layout(dp=4, tp=2, ep=4, micro=1, engine="native"), {}),
    ("llama", Layout(dp=2, tp=2, micro=4, engine="native"), {}),
]


def check(model: str, layout: Layout, more: dict[str, Any]) -> list[dict[str, Any]]:
    curves = run_distributed(train, layout.world, {**MODELS[model], **more}, layout, STEPS, timeout=180)
    assert_same(model, layout, curves)
    return curves


def name_of(x: Any) -> str | None:
    return getattr(x, "name", None) or (x if isinstance(x, str) else "recomputed" if x else "plain")


@pytest.mark.parametrize(("model", "layout", "more"), COVERING, ids=name_of)
def test_same_curve(model: str, layout: Layout, more: dict[str, Any]) -> None:
    check(model, layout, more)


@pytest.mark.full
@pytest.mark.parametrize(("model", "layout", "more"), MORE, ids=name_of)
def test_same_curve_at_more_layouts(model: str, layout: Layout, more: dict[str, Any]) -> None:
    check(model, layout, more)


def test_ranks_without_rows_and_experts_without_tokens_take_part() -> None:
    """The runs above do meet them: an expert without a token, ranks that send each other different numbers of rows."""
    curves = check("neox", Layout(dp=4, ep=4, micro=1), {})
    assert all(min(curve["least"]) == 0 for curve in curves), "no expert was ever without a token"
    assert all(len(set(curve["sent"])) > 3 for curve in curves), "rows were never dealt out unevenly"


def train_bf16(rank: int, world: int, keys: dict[str, Any], layout: Layout, steps: int) -> Any:
    """`train`, and the types and sizes of weights, masters and gradients."""
    curve = train(rank, world, keys, layout, steps)
    engine, args, lr = build(rank, keys, layout)
    engine.before_update = lambda: curve.update(gradients={g.dtype for g in engine.grads().values()})
    engine.train_batch(step_batch(0, args, engine.state), lr(0))
    inner = engine.deepspeed.optimizer
    inner = getattr(inner, "optimizer", inner)
    curve["weights"] = {p.dtype for p in engine.params().values()}
    curve["masters"] = sum(p.numel() for p in inner.state)
    curve["held"] = sum(p.numel() for p in engine.params().values())
    return curve


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=4, ep=2, micro=1),
        Layout(dp=2, tp=2, ep=2),
        pytest.param(Layout(pp=2, dp=2, ep=2), marks=pytest.mark.slow),
    ],
    ids=name_of,
)
def test_bf16_trains_as_one_rank_does(layout: Layout) -> None:
    """With fp32 masters, divided among the ranks that hold the same weights.

    Later steps differ by more than rounding: a token whose two best experts are nearly as good goes to the other one,
    also on one rank in other micro-batches.
    """
    keys = {**MODELS["llama"], "precision": "bfloat16"}
    layout = dataclasses.replace(layout, zero=1)
    ours, other = (run_distributed(train_bf16, 1, keys, Layout(micro=micro), STEPS)[0] for micro in (8, 1))
    for curve in run_distributed(train_bf16, layout.world, keys, layout, STEPS, timeout=110):
        assert curve["weights"] == {torch.bfloat16} and curve["gradients"] == {torch.float32}
        for key, rounding in (("loss", 1e-3), ("grad_norm", 2e-2)):
            rerouted = max(abs(a / b - 1) for a, b in zip(other[key], ours[key], strict=True))
            assert curve[key][: STEPS // 2] == pytest.approx(ours[key][: STEPS // 2], rel=rounding)
            assert curve[key] == pytest.approx(ours[key], rel=max(rounding, 3 * rerouted))
        assert curve["loss"] == pytest.approx(one_rank("llama")["loss"], rel=5e-3)
        assert curve["masters"] < curve["held"]


def check_replicas(rank: int, world: int, corrupt: str, at: int) -> str:
    engine, *_ = build(rank, MODELS["llama"], Layout(dp=4, ep=2, micro=1))
    if rank == at:
        with torch.no_grad():
            engine.params()[corrupt].view(-1)[0] += 1e-3
    trainer: Any = SimpleNamespace(state=engine.state, engine=engine, step=1, settle=lambda: None)
    try:
        ReplicaCheck(1).after_step(trainer, None)  # type: ignore[arg-type]
    except NumericsError as error:
        return str(error)
    return ""


EXPERT, DENSE = "3.mlp.experts.linear1", "2.mlp.linear1.weight"


@pytest.mark.parametrize(
    ("corrupt", "found", "seen_by"), [("", "", ()), (EXPERT, "expert_data", (0, 2)), (DENSE, "data", (0, 1, 2, 3))]
)
def test_the_replica_check_knows_that_experts_differ(corrupt: str, found: str, seen_by: tuple[int, ...]) -> None:
    messages = run_distributed(check_replicas, 4, corrupt or DENSE, 2 if corrupt else -1)
    for rank, message in enumerate(messages):
        if rank in seen_by:
            assert message.startswith(
                f"{found}-parallel replicas differ at iteration 1 in 1 parameters, first {corrupt}"
            )
        else:
            assert message == ""


def train_compiled(rank: int, world: int, keys: dict[str, Any], layout: Layout, steps: int) -> Any:
    original = build

    def compiled(*arguments: Any) -> Any:
        engine, args, lr = original(*arguments)
        assert sum(compile_blocks(engine.module, backend="aot_eager")) == args.model.num_layers
        return engine, args, lr

    with mock.patch("tests.training.test_expert_parallel.build", compiled):
        return train(rank, world, keys, layout, steps)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_compiled_blocks_exchange_too() -> None:
    layout = Layout(dp=2, ep=2)
    assert_same("llama", layout, run_distributed(train_compiled, 2, MODELS["llama"], layout, 3, timeout=280))


LONELY = 3  # an expert that no token is ever sent to


def train_lonely(rank: int, world: int, keys: dict[str, Any], layout: Layout, steps: int) -> Any:
    original = build

    def avoided(*arguments: Any) -> Any:
        engine, args, lr = original(*arguments)
        for name, p in engine.params().items():
            if name.endswith("router.expert_bias"):
                p.data[LONELY] = -100.0
        return engine, args, lr

    with mock.patch("tests.training.test_expert_parallel.build", avoided):
        return train(rank, world, keys, layout, steps)


def test_an_expert_without_tokens_decays_as_it_does_on_one_rank() -> None:
    """Its gradient is zero, not missing: weight decay and moments go on."""
    keys = {**MODELS["documents"], "moe_bias_balancing_rate": 1e-3}
    ours = run_distributed(train_lonely, 1, keys, Layout(micro=8), STEPS)[0]
    for curve in run_distributed(train_lonely, 4, keys, Layout(dp=4, ep=4, micro=1), STEPS):
        assert curve["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        for name, value in curve["state"].items():
            assert value == pytest.approx(ours["state"][name], rel=1e-3), name


def balanced_run(folder: Path, layout: Layout, **more: Any) -> list[runs.Report]:
    folder.mkdir(exist_ok=True)
    keys = {
        **models.EXPERTS,
        "data_path": runs.corpus(folder / "data"),
        "moe_top_k": 2,
        "moe_bias_balancing_rate": 0.01,
        "moe_aux_loss_coeff": 0.01,
        "replica_check_interval": 1,
        "log_grad_norm": True,
        "log_param_norm": True,
        "save": str(folder / "run"),
        **more,
    }
    reports = runs.run(keys, layout)
    assert [report.error for report in reports] == [""] * layout.world
    return reports


def test_whole_runs_log_and_balance_alike_and_resume_at_another_division(tmp_path: Path) -> None:
    """Biases that balance are moved by the counts of all data ranks; norms in the log are of whole parameters."""
    one = balanced_run(tmp_path / "one", Layout(micro=4), expert_parallel_size=1)[0]
    assert any("expert_bias" in name for name in one.state)
    balanced_run(tmp_path / "two", Layout(dp=4, ep=2, micro=1), exit_interval=3)
    for report in balanced_run(tmp_path / "two", Layout(dp=2, ep=2, tp=2)):
        assert report.steps == one.steps[3:]
        assert report.loss == pytest.approx(one.loss[3:], rel=1e-5)
        for (step, metrics), (expected_step, expected) in zip(report.logged, one.logged[3:], strict=True):
            assert step == expected_step
            wanted = [n for n in expected if n.startswith(("moe/", "gradient_norms/", "parameter_norms/"))]
            assert {n.split("/")[0] for n in wanted} == {"moe", "gradient_norms", "parameter_norms"}
            for name in wanted:
                assert metrics[name] == pytest.approx(expected[name], rel=1e-3), name
        biases = {name: value for name, value in one.state.items() if "expert_bias" in name}
        assert {name: report.state[name] for name in biases} == biases


@pytest.mark.full
def test_what_the_layout_may_change_expert_parallelism_does_not() -> None:
    """Sinkhorn, dropping, noise and dropout depend on a rank's tokens and random numbers, not on who holds experts."""
    keys = {**MODELS["neox"], "moe_router_type": "sinkhorn", "moe_capacity_factor": 1.0, "hidden_dropout": 0.1}
    del keys["moe_aux_loss_coeff"]  # which balances top-k routing
    noisy = {**MODELS["llama"], "moe_jitter_eps": 0.1}
    for chosen in (keys, noisy):
        alone, shared = (run_distributed(train, 2, chosen, Layout(dp=2, ep=ep), STEPS)[0] for ep in (1, 2))
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
