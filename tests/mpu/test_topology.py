"""Rank arithmetic, and the launchers' environment variables."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import UserError
from megatron.mpu.topology import RankInfo, Topology, ranks_from_environment, slurm_world_size, tasks_per_node

pytestmark = pytest.mark.cpu

THREE = st.fixed_dictionaries({name: st.integers(1, 4) for name in ("pipe", "data", "model")})


def test_ranks_of_a_3d_layout_are_those_of_deepspeed() -> None:
    """DeepSpeed's PipeModelDataParallelTopology: axes pipe, data, model, the last varying fastest."""
    topology = Topology({"pipe": 2, "data": 2, "model": 2})
    assert topology.world_size == 8
    assert topology.groups("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.groups("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.groups("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.groups("pipe", "model") == topology.groups("model", "pipe") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert topology.coord(6) == {"pipe": 1, "data": 1, "model": 0}
    assert topology.rank(model=0, pipe=1, data=1) == 6


@given(THREE, st.sets(st.sampled_from(["pipe", "data", "model", "context"])))
def test_groups_cover_the_world_and_differ_only_in_their_axes(sizes: dict[str, int], axes: set[str]) -> None:
    topology = Topology(sizes)
    groups = topology.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    others = [name for name in sizes if name not in axes]
    keys = {tuple(topology.coord(rank)[name] for name in others) for group in groups for rank in group}
    assert len(keys) == len(groups)
    for group in groups:
        assert group == sorted(group)
        assert len({tuple(topology.coord(rank)[name] for name in others) for rank in group}) == 1


@given(THREE)
def test_coord_and_rank_are_inverse(sizes: dict[str, int]) -> None:
    topology = Topology(sizes)
    assert [topology.rank(**topology.coord(rank)) for rank in range(topology.world_size)] == list(
        range(topology.world_size)
    )


def test_any_number_of_axes_and_equality() -> None:
    five = Topology({"pipe": 2, "data": 1, "expert": 2, "context": 1, "model": 2})
    assert five.groups("expert", "model") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert five.size("context") == five.size("unheard of") == 1
    assert Topology({}).groups("model") == [[0]]
    assert Topology({"a": 2, "b": 1}) == Topology({"a": 2, "b": 1}) != Topology({"b": 1, "a": 2})
    assert len({Topology({"a": 2}), Topology({"a": 2})}) == 1


def test_wrong_layouts_and_ranks_are_refused() -> None:
    with pytest.raises(UserError, match="'model' has size 0"):
        Topology({"model": 0})
    with pytest.raises(UserError, match="rank 2 does not exist"):
        Topology({"model": 2}).coord(2)
    with pytest.raises(ValueError, match="no axis 'modle'.*'model'"):
        Topology({"model": 2}).rank(modle=1)
    with pytest.raises(ValueError, match="axis model of "):
        Topology({"model": 2}).rank()
    with pytest.raises(ValueError, match="model=-1"):
        Topology({"model": 2}).rank(model=-1)


SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, (0, 0, 1)),
        ({"HOME": "/", "LOCAL_RANK": "3"}, (0, 0, 1)),  # only a rank variable says that a launcher is there
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, (3, 1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 1, 4)),
        ({"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_SIZE": "4"}, (3, 1, 4)),
        ({"PMI_RANK": "3", "MPI_LOCALRANKID": "1", "PMI_SIZE": "4"}, (3, 1, 4)),
        ({**SLURM, "SLURM_NTASKS": "8"}, (5, 1, 8)),
        ({**SLURM, "SLURM_NPROCS": "8"}, (5, 1, 8)),
        ({**SLURM, "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}, (5, 1, 8)),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4(x2)"}, (5, 1, 8)),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4(x2),2"}, (5, 1, 10)),
        # a step of 6 tasks inside a job of 8
        ({**SLURM, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "6"}, (5, 1, 6)),
        # srun --mpi=pmi2 sets PMI variables too
        ({**SLURM, "SLURM_NTASKS": "8", "PMI_RANK": "5", "PMI_SIZE": "8"}, (5, 1, 8)),
        # mpirun in an allocation: SLURM's variables describe the daemon, one per node
        (
            {
                "SLURM_PROCID": "1",
                "SLURM_LOCALID": "0",
                "SLURM_NTASKS": "2",
                "OMPI_COMM_WORLD_RANK": "6",
                "OMPI_COMM_WORLD_LOCAL_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "8",
            },
            (6, 2, 8),
        ),
        # torchrun started by srun, one per node
        (
            {
                "SLURM_PROCID": "1",
                "SLURM_LOCALID": "0",
                "SLURM_NTASKS": "2",
                "RANK": "6",
                "LOCAL_RANK": "2",
                "WORLD_SIZE": "8",
            },
            (6, 2, 8),
        ),
    ],
)
def test_ranks_from_every_launcher(env: dict[str, str], expected: tuple[int, int, int]) -> None:
    assert ranks_from_environment(env) == RankInfo(*expected)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (SLURM, "SLURM_NTASKS, SLURM_NNODES with SLURM_NTASKS_PER_NODE, or SLURM_TASKS_PER_NODE"),
        ({**SLURM, "SLURM_NNODES": "2"}, "SLURM_NTASKS_PER_NODE"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_LOCALID is not"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4(2)"}, r"SLURM_TASKS_PER_NODE='4\(2\)' is not a list"),
        ({"RANK": "0"}, "LOCAL_RANK and WORLD_SIZE are not"),
        ({"RANK": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE is not"),
        ({"RANK": "zero", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "RANK='zero' is not a whole number"),
        ({"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, "contradict each other: rank 4"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not"),
    ],
)
def test_incomplete_variables_are_named(env: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ranks_from_environment(env)


def test_slurm_counts_without_a_rank() -> None:
    """Known fault: `--ntasks-per-node` alone sets no SLURM_NTASKS."""
    assert slurm_world_size({"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}) == 8
    assert slurm_world_size({"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "4"}) == 12
    assert tasks_per_node("4(x2),2") == [4, 4, 2]
    assert tasks_per_node("16") == [16]


def test_rank_arithmetic_needs_no_torch() -> None:
    """`deepy.py --dry-run` uses it, and importing torch takes seconds."""
    code = "import sys, megatron.mpu.topology; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
