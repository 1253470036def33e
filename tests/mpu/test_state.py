"""Process groups per rank, and what a rank knows about itself."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu


def members(rank: int, world_size: int, axes: dict[str, int]) -> dict[str, list[int] | None]:
    """For each group: the ranks that a gather over it reaches."""
    state = ParallelState.build(Topology(axes), rank, "cpu")
    reached: dict[str, list[int] | None] = {}
    for name in ("model", "data", "pipe", "model_pipe"):
        group = state.group(name)
        if group is None:
            reached[name] = None
            continue
        ranks = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
        dist.all_gather(ranks, torch.tensor([rank]), group=group)
        reached[name] = [int(r) for r in ranks]
    return reached


@pytest.mark.parametrize("axes", [{"pipe": 2, "data": 1, "model": 2}, {"pipe": 1, "data": 2, "model": 2}])
def test_groups_reach_the_ranks_of_the_topology(axes: dict[str, int]) -> None:
    results = run_distributed(members, 4, axes)
    topology = Topology(axes)
    for name, over in (("model", "model"), ("data", "data"), ("pipe", "pipe"), ("model_pipe", "model pipe")):
        for group in topology.groups(*over.split()):
            for rank in group:
                assert results[rank][name] == (group if len(group) > 1 else None)


def test_ranks_and_stages() -> None:
    topology = Topology({"pipe": 3, "data": 2, "model": 2})
    states = [ParallelState(topology, rank, torch.device("cpu")) for rank in range(12)]
    assert [(s.pp_rank, s.dp_rank, s.tp_rank) for s in states] == [
        (p, d, m) for p in range(3) for d in range(2) for m in range(2)
    ]
    assert {(s.pp_size, s.dp_size, s.tp_size) for s in states} == {(3, 2, 2)}
    assert [s.is_first_stage for s in states] == [True] * 4 + [False] * 8
    assert [s.is_last_stage for s in states] == [False] * 8 + [True] * 4


def test_sequence_parallel_needs_several_tensor_parallel_ranks() -> None:
    one, two = Topology({"model": 1}), Topology({"model": 2})
    assert not ParallelState(one, 0, torch.device("cpu"), sequence_parallel=True).sequence_parallel
    assert ParallelState(two, 0, torch.device("cpu"), sequence_parallel=True).sequence_parallel


def test_a_single_process_needs_no_groups() -> None:
    state = ParallelState.single()
    assert not dist.is_initialized()
    assert state.group("model") is state.group("model_pipe") is None
    assert state.is_first_stage and state.is_last_stage
    assert copy.deepcopy(state) is state
    with pytest.raises(ValueError, match="no group 'tensor'"):
        state.group("tensor")


def wrong_world(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="needs 4 ranks, there are 2") as error:
        ParallelState.build(Topology({"model": 4}), rank, "cpu")
    return str(error.value)


def test_a_topology_of_another_size_than_the_job_is_refused() -> None:
    assert "model=4" in run_distributed(wrong_world, 2)[0]
