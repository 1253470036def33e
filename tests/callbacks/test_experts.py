"""Load of experts in the log, and biases that move once per step: alone, over data ranks, in a pipeline, resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.callbacks.experts import ExpertLoad, load_metrics
from megatron.callbacks.flops import Flops
from megatron.callbacks.meter import Meter
from megatron.layers.moe import MixtureOfExperts
from megatron.mpu import sharding
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.schema_model import ModelConfig
from tests.callbacks import fakes
from tests.model.networks import tiny
from tests.training.runs import corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

MOE: dict[str, Any] = {
    "moe_num_experts": 4,
    "moe_router_type": "topk",
    "moe_top_k": 2,
    "moe_capacity_factor": 1.0,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
}


def _model(**changes: Any) -> ModelConfig:
    return tiny(**{**MOE, **changes})


# ---- the numbers


def test_metrics_by_hand() -> None:
    rows = [[10.0, 10, 10, 10, 4, 6.0, 3.0, 2.0], [40.0, 0, 0, 0, 12, 10.0, 5.0, 2.0]]
    found = load_metrics(torch.tensor(rows, dtype=torch.float64), [0, 2], _model())
    metrics = {name: float(value) for name, value in found.items()}
    assert metrics == pytest.approx(
        {
            "moe/load_max": 4.0,
            "moe/load_min": 0.0,
            "moe/load_entropy": 0.5,
            "moe/dropped_share": 16 / 80,
            "moe/balance_loss": (6 / 2 + 10 / 2) / 2,
            "moe/z_loss": (3 / 2 + 5 / 2) / 2,
            "moe/layer_0/load_max": 1.0,
            "moe/layer_0/load_min": 1.0,
            "moe/layer_0/load_entropy": 1.0,
            "moe/layer_2/load_max": 4.0,
            "moe/layer_2/load_min": 0.0,
            "moe/layer_2/load_entropy": 0.0,
        }
    )


def test_what_is_not_asked_for_is_not_logged() -> None:
    model = _model(moe_capacity_factor=None, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.0)
    names = load_metrics(torch.ones(1, 8), [0], model)
    assert not {"moe/dropped_share", "moe/balance_loss", "moe/z_loss"} & set(names)


# ---- when they are taken


class _Stage(nn.Module):
    """Two mixtures of experts, named as blocks 0 and 1."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for index in (2, 3):
            holder = nn.Module()
            holder.mlp = MixtureOfExperts(model, ParallelState.single())
            sharding.bind(holder, index)
            self.layers.append(holder)

    def count(self, *chosen: list[int]) -> None:
        """As if a micro-batch had been trained."""
        for holder, row in zip(self.layers, chosen, strict=True):
            holder.mlp.load._sums += torch.tensor([*row, 0.0, 2.0, 1.0, 1.0], dtype=torch.float64)


def _run(model: ModelConfig, outs: list[Any], counts: list[tuple[list[int], ...]]) -> tuple[_Stage, list[Any]]:
    """Three steps, of which each trained `counts`."""
    stage, meter, log = _Stage(model), Meter(3, Flops(1.0, 1, None)), fakes.Log()
    trainer = fakes.trainer_of([ExpertLoad(model), meter, log], outs, train_iters=3, log_interval=3)
    trainer.engine.module = stage
    waiting = iter(counts)
    step = trainer.engine.train_batch

    def train_batch(batch: Any, lr: float) -> Any:
        stage.count(*next(waiting))
        return step(batch, lr)

    trainer.engine.train_batch = train_batch
    trainer.run()
    return stage, log.logged_


def test_one_log_is_the_sum_of_its_steps() -> None:
    counts = [([8, 0, 0, 0], [2, 2, 2, 2]), ([0, 8, 0, 0], [2, 2, 2, 2]), ([0, 0, 8, 8], [2, 2, 2, 2])]
    _, [(step, metrics)] = _run(_model(), [], counts)
    assert step == 3
    assert (metrics["moe/layer_0/load_max"], metrics["moe/layer_0/load_min"]) == (1.0, 1.0)
    assert metrics["moe/balance_loss"] == 2.0


def test_biases_move_at_every_step_that_is_not_skipped() -> None:
    model = _model(moe_bias_balancing_rate=0.5)
    counts = [([8, 0, 4, 4], [2, 2, 2, 2]), ([9, 1, 1, 1], [9, 1, 1, 1]), ([8, 0, 4, 4], [8, 0, 0, 0])]
    outs = [fakes.out(), fakes.out(norm=math.nan, skipped=True), fakes.out()]
    stage, [(_, metrics)] = _run(model, outs, counts)
    first, second = (holder.mlp.router.expert_bias.tolist() for holder in stage.layers)
    assert first == [-1.0, 1.0, 0.0, 0.0] and second == [-0.5, 0.5, 0.5, 0.5]
    assert metrics["moe/layer_0/load_max"] == 2.0  # without the step that was skipped


# ---- whole runs


KEYS = {**MOE, "num_layers": 4, "moe_layers": [0, 2, 3], "moe_intermediate_size": 24, "moe_bias_balancing_rate": 0.01}


def _logged(report: Any) -> list[dict[str, float]]:
    return [{k: v for k, v in metrics.items() if k.startswith("moe/")} for _, metrics in report.logged]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return corpus(tmp_path_factory.mktemp("corpus"))


def test_the_log_is_the_same_at_any_layout(data: str) -> None:
    whole = run({**KEYS, "data_path": data}, Layout(micro=8))[0]
    expected = _logged(whole)
    assert len(expected) == 6 and all(step["moe/load_max"] > 1 > step["moe/load_min"] for step in expected)
    assert "moe/layer_2/load_max" in expected[0] and "moe/layer_1/load_max" not in expected[0]
    for layout in (Layout(dp=2), Layout(pp=2), Layout(tp=2, dp=2, zero=1)):
        for report in run({**KEYS, "data_path": data}, layout):
            assert not report.error
            for mine, theirs in zip(_logged(report), expected, strict=True) if report.logged else ():
                assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "keys"), [(Layout(dp=2, zero=1), {}), (Layout(pp=2), {"precision": "bfloat16"})], ids=str
)
def test_resume_is_bit_exact(tmp_path: Path, data: str, layout: Layout, keys: dict[str, Any]) -> None:
    """The biases are resumed, like the weights, moments and routes."""
    keys = {**KEYS, **keys, "data_path": data, "moe_jitter_eps": 0.1}
    straight = run({**keys, "save": str(tmp_path / "a")}, layout)
    resumed = run({**keys, "load": str(tmp_path / "a"), "iteration": 3, "save": str(tmp_path / "b")}, layout)
    for before, after in zip(straight, resumed, strict=True):
        assert not before.error and not after.error
        assert after.loss == before.loss[3:] and after.grad_norm == before.grad_norm[3:]
        assert before.state and after.state == before.state
    names = {name for report in straight for name in report.state}
    assert "4.mlp.router.expert_bias/weight" in names and "4.mlp.router.expert_bias/exp_avg" not in names
    lines = (tmp_path / "a" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert all("moe/load_entropy" in json.loads(line) for line in lines if "train/lm_loss" in line)
    assert (tmp_path / "a" / "global_step6").is_dir()


def test_a_checkpoint_is_resumed_at_another_layout(tmp_path: Path, data: str) -> None:
    keys = {**KEYS, "data_path": data, "save": str(tmp_path / "a")}
    straight = run(keys, Layout(tp=2, pp=2))[0]
    again = {"load": str(tmp_path / "a"), "iteration": 3, "save": str(tmp_path / "b")}
    resumed = run({**keys, **again}, Layout(dp=2))[0]
    assert not straight.error and not resumed.error
    assert resumed.loss == pytest.approx(straight.loss[3:], rel=1e-5)
