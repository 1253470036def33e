"""The report of who is waited for."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.callbacks.stragglers import Stragglers, time_products
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.training.progress import PHASES, Progress
from tests.distributed import run_distributed
from tests.training.runs import Faults, corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

SECONDS = 0.2


def test_the_rank_that_reads_slowly_is_named(tmp_path):
    keys = {"data_path": corpus(tmp_path), "train_iters": 4, "straggler_interval": 2, "log_interval": 2}
    for report in run(keys, Layout(dp=2, tp=2), Faults(slow=(2, SECONDS))):
        assert [step for step, _ in report.logged] == [2, 4]
        for _, metrics in report.logged:
            assert metrics["stragglers/rank"] == 2 and SECONDS / 2 < metrics["stragglers/wait"] < 10 * SECONDS
            assert metrics["stragglers/slowness"] >= 1


def compare(rank: int, world: int) -> dict[str, float]:
    """Two steps in which rank 1 works and the others sleep."""
    state = ParallelState.build(Topology({"pipe": 1, "data": world, "model": 1}), rank, "cpu")
    progress = Progress()
    trainer: Any = SimpleNamespace(state=state, progress=progress, step=0, metrics={}, settle=lambda: None)
    trainer.engine = SimpleNamespace(waited=0.0)
    report = Stragglers(2)
    report.loaded(trainer)
    for step in (1, 2):
        progress.enter(PHASES[0], step)
        progress.enter(PHASES[1], step)
        until = time.thread_time() + 0.05
        while rank == 1 and time.thread_time() < until:
            pass
        time.sleep(0.02)
        trainer.engine.waited += 0.0 if rank == 2 else 0.5
        progress.enter(PHASES[2], step)
        trainer.step = step
        report.after_step(trainer, None)
    return trainer.metrics


def test_the_rank_that_computes_slowly_is_named():
    for metrics in run_distributed(compare, 3):
        assert metrics["stragglers/slowest"] == 1 and metrics["stragglers/slowness"] > 5
        assert (metrics["stragglers/rank"], metrics["stragglers/wait"]) == (2, 0.5)


@pytest.mark.gpu
def test_products_take_time():
    assert 0 < time_products(torch.device("cuda")) < 1
