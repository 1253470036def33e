"""Which clock ends what, and that only the device's groups are hurried."""

from __future__ import annotations

import os
import pickle
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.agreement import meet
from megatron.mpu.doing import Doing
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.run.end import StepLimits, watched
from megatron.training import flight_recorder
from megatron.training.progress import SLOW_SECONDS, Progress
from megatron.training.rendezvous import lost_rank
from megatron.training.time_limits import TimeLimits
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu


def test_each_clock_is_later_than_the_one_before() -> None:
    for watchdog in (30.0, 600.0, 20000.0):
        limits = TimeLimits(distributed=7200.0, collective=600.0, watchdog=watchdog)
        assert limits.host > max(watchdog, SLOW_SECONDS)
        for longest in (1.0, 500.0):
            assert max(watchdog, 3 * longest) < limits.device(longest) <= limits.host
    assert TimeLimits(7200.0, 600.0, 600.0).device(1.0) == 660.0
    assert TimeLimits(7200.0, 600.0, 0.0).device(1000.0) == 600.0  # nobody waits for three long steps
    assert TimeLimits(60.0, 600.0, 0.0).device(1.0) == TimeLimits(60.0, 600.0, 0.0).host == 60.0
    assert TimeLimits(7200.0, 0.0, 600.0).device(1.0) == 7200.0


def after_the_first_steps(rank: int, world: int) -> dict:
    """Rank 1 comes late to collective operations: of the first steps, to the host, to those of later steps."""
    state = ParallelState.build(Topology({"pipe": 1, "data": world, "model": 1}), rank, "cpu")
    progress, limits = Progress(), StepLimits(TimeLimits(7200.0, 1.0, 0.0))
    trainer = SimpleNamespace(progress=progress, state=state)
    found = {}

    def step(number: int, late: float = 0.0, upload: float = 0.0) -> None:
        progress.enter("reading data", number)
        progress.enter("training", number)
        time.sleep(late if rank == 1 else 0.0)
        dist.all_reduce(torch.ones(1), group=state.group("data"))
        progress.complete()
        progress.enter("callbacks", number)
        if upload:
            with progress.during("evaluation"):
                pass
            time.sleep(upload if rank == 1 else 0.0)
        limits.after_step(trainer, None)
        limits.settled(trainer, SimpleNamespace(step=number))

    step(7, late=1.5)
    step(8, late=1.5)
    time.sleep(1.5 if rank == 1 else 0.0)  # one rank deletes old checkpoints
    meet(state)
    step(9, upload=1.5)  # by one rank, of what was evaluated
    step(10)
    if rank == 0:
        started = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=state.group("data"))
        except RuntimeError as error:
            found["lost"] = str(lost_rank(error))
        found["seconds"] = time.monotonic() - started
    else:
        time.sleep(2.5)
    return found


def test_after_the_first_steps_the_device_is_not_waited_for_long_and_the_host_is() -> None:
    found = run_distributed(after_the_first_steps, 2)[0]
    assert {"collective_timeout", "distributed_timeout"} <= set(re.findall(r"\w+", found["lost"]))
    assert 0.9 < found["seconds"] < 2.4


def test_the_users_own_settings_of_the_recorder_win() -> None:
    assert flight_recorder.settings({}, "/run") == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "/run/flight_recorder/rank_",
    }
    own = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/x"}
    assert flight_recorder.settings(own, "/run") == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert "TORCH_FR_DUMP_TEMP_FILE" not in flight_recorder.settings({}, None)


def recorded(rank: int, world: int, folder: str) -> None:
    os.environ.update(flight_recorder.settings(os.environ, folder))
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world)
    dist.all_reduce(torch.ones(3))
    flight_recorder.dump(Path(f"{flight_recorder.prefix_of(folder)}{rank}"))


def test_the_last_collectives_of_each_rank_are_written_where_torch_would_write_them(tmp_path) -> None:
    run_distributed(recorded, 2, str(tmp_path), backend=None)
    for rank in (0, 1):
        trace = pickle.loads((tmp_path / "flight_recorder" / f"rank_{rank}").read_bytes())
        assert any("all_reduce" in entry["profiling_name"] for entry in trace["entries"])


@pytest.mark.parametrize(("backend", "file"), [("nccl", "/run/flight_recorder/rank_1"), ("gloo", None)])
def test_the_watchdog_writes_what_can_be_read(backend: str, file: str | None, monkeypatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    state = SimpleNamespace(topology=SimpleNamespace(world_size=2), rank=1, doing=Doing())
    watchdog = watched(NeoXArgs.from_saved({"save": "/run"}), state, dist.HashStore(), Progress())
    assert watchdog.trace == (None if file is None else Path(file))
