"""A signal to one rank ends the job on every rank after the same step, at every layout and at no cost."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.find import list_checkpoints
from megatron.checkpoint.load import load_checkpoint
from megatron.run import start
from megatron.signals import raise_stop_requests
from tests.distributed import run_distributed
from tests.training.runs import Faults, Report, corpus, run, train
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


def loaded(rank: int, world: int, keys: dict[str, Any], layout: Layout, number: int | None) -> dict[str, Any]:
    """A rank of a run that resumes; the last one gets a signal when half of its parameters are loaded."""
    found: dict[str, Any] = {}
    raise_stop_requests()  # as setup does

    def load(checkpoint: Any, engine: Any, *arguments: Any, **options: Any) -> Any:
        progress = engine.beat.__self__
        found["watched"], before = progress.began, progress.count
        with mock.patch.object(engine, "write_share", partial(signalled, engine.write_share)):
            client = load_checkpoint(checkpoint, engine, *arguments, **options)
        found["beats"] = progress.count - before
        return client

    def signalled(write: Any, name: str, values: Any) -> None:
        found["parameters"] = found.get("parameters", 0) + 1
        if number is not None and rank == world - 1 and found["parameters"] == 3:
            os.kill(os.getpid(), number)
        write(name, values)

    with mock.patch.object(start, "load_checkpoint", load):
        found["report"] = train(rank, world, keys, layout, Faults())
    return found


def test_loading_is_watched_and_a_signal_in_it_ends_the_start_at_once(tmp_path: Path) -> None:
    keys = {"data_path": corpus(tmp_path / "data"), "save": str(tmp_path / "a"), "train_iters": 2}
    layout = Layout(dp=2, zero=1)
    run({**keys, "exit_interval": 1}, layout)
    for found in run_distributed(loaded, 2, {**keys, "train_iters": 1}, layout, None, timeout=110):
        assert found["watched"] and found["beats"] >= found["parameters"] > 3
    (found,) = run_distributed(loaded, 1, keys, Layout(), int(signal.SIGUSR2), timeout=110)
    report = found["report"]
    assert (report.exit_code, report.steps) == (3, []) and "SIGUSR2" in report.error
    assert found["parameters"] == 3 and "beats" not in found
    assert list_checkpoints(tmp_path / "a").steps == (1,)
    assert json.loads((tmp_path / "a" / "status.json").read_text())["exit_code"] == 3
