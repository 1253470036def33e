"""A signal to one rank ends the job on every rank after the same step, at every layout and at no cost."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.find import list_checkpoints
from tests.distributed import run_distributed
from tests.training.runs import Faults, Report, corpus, train
from tests.training.tiny import Layout

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

COLLECTIVES = ("all_reduce", "all_gather_object", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")


def counted(rank: int, world: int, keys: dict[str, Any], layout: Layout, faults: Faults) -> tuple[Report, Counter]:
    """A rank of a run, and how often it called each collective, and read a tensor on the host."""
    calls: Counter = Counter()

    def counting(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        return call

    patches = [mock.patch.object(dist, name, counting(name, getattr(dist, name))) for name in COLLECTIVES]
    reads = ("item", "tolist", "__bool__", "__float__", "__int__")
    patches += [mock.patch.object(torch.Tensor, name, counting("host", getattr(torch.Tensor, name))) for name in reads]
    for patch in patches:
        patch.start()
    try:
        return train(rank, world, keys, layout, faults), calls
    finally:
        for patch in patches:
            patch.stop()


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(pp=2), Layout(tp=2, dp=2), Layout(dp=2, zero=1)], ids=lambda layout: layout.name
)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path, layout: Layout) -> None:
    keys = {"data_path": corpus(tmp_path / "data"), "train_iters": 4, "checkpoint_factor": 1000}
    last = layout.world - 1
    faults = Faults(signal=(last, 2, int(signal.SIGUSR1)))
    stopped = run_distributed(counted, layout.world, {**keys, "save": str(tmp_path / "a")}, layout, faults, timeout=110)
    for report, _ in stopped:
        assert (report.steps, report.exit_code) == ([1, 2], 3) and "SIGUSR1 at iteration 2 " in report.error
    assert list_checkpoints(tmp_path / "a").steps == (2,)
    without = {**keys, "callbacks": {"stop_on_signal": False}, "train_iters": 2, "save": str(tmp_path / "b")}
    for (_, calls), (_, bare) in zip(stopped, run_distributed(counted, layout.world, without, layout, Faults())):
        assert 0 < calls.pop("host") <= bare.pop("host")  # the run that was not stopped also reads at its end
        assert calls == bare and (calls["all_reduce"] > 0 or layout.pp > 1)
