"""What all ranks agree on goes over the host: nothing here needs the device's groups, nor hurries anybody."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.agreement import agree, await_thread, broadcast, gather, gather_over_stages, meet, together
from megatron.errors import UserError
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.training.l2_norms import all_names
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu


def wait_for_slow_work(rank: int, world: int) -> dict:
    """The groups of the device allow less time than rank 0's work takes."""
    topology = Topology({"pipe": world, "data": 1, "model": 1})
    short = timedelta(seconds=0.5)
    dist.distributed_c10d._set_pg_timeout(short)
    state = ParallelState.build(topology, rank, "cpu", timeout=short)
    assert dist.get_backend(state.host) == "gloo"
    with together("building the sample index", state):
        if rank == 0:
            time.sleep(1.5)
    failures = agree(UserError("no data") if rank == 1 else None, state)
    thread = threading.Thread(target=time.sleep, args=(0.2,)) if rank == 0 else None
    if thread is not None:
        thread.start()
    rounds = sum(1 for _ in await_thread(thread, state))
    if rank == 1:
        time.sleep(0.7)
    meet(state)
    return {
        "failures": {one: (type(error), str(error)) for one, error in failures.items()},
        "gathered": gather({"rank": rank}, state),
        "stages": gather_over_stages(torch.full((2,), rank), state),
        "names": all_names([f"layer {rank}", "tied"], state),
        "first": broadcast("of rank 0" if rank == 0 else None, state),
        "rounds": rounds,
    }


def test_ranks_wait_for_slow_work_on_the_host_and_not_in_the_groups_of_the_device() -> None:
    for found in run_distributed(wait_for_slow_work, 2):
        assert found["failures"] == {1: (UserError, "no data")}
        assert found["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert [stage.tolist() for stage in found["stages"]] == [[0, 0], [1, 1]]
        assert found["names"] == ["layer 0", "tied", "layer 1"]
        assert found["first"] == "of rank 0" and found["rounds"] >= 1


def stages_of_a_grid(rank: int, world: int) -> list[int]:
    state = ParallelState.build(Topology({"pipe": world // 2, "data": 1, "model": 2}), rank, "cpu")
    return gather_over_stages(rank, state)


def test_stages_exchange_with_those_of_their_own_pipeline() -> None:
    assert run_distributed(stages_of_a_grid, 4) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_one_rank_needs_nobody() -> None:
    state = ParallelState.single()
    assert state.host is None and agree(None, state) == {}
    assert gather(1, state) == gather_over_stages(1, state) == [1] and broadcast(2, state) == 2
    meet(state)
