"""Where the ranks of `srun python train.py` and of an mpirun in a SLURM job meet, and what a rank sets besides."""

from __future__ import annotations

import pytest

from megatron.cluster import rank
from megatron.cluster.rank import gloo_interface, prepare_rank, set_rendezvous, usable_interfaces

pytestmark = pytest.mark.cpu

STEP = {"SLURM_JOB_ID": "12345", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}
NODES = {"SLURM_JOB_NODELIST": "nid[001-004]", "SLURM_STEP_NODELIST": "nid[002-003]"}
MPI = {"OMPI_COMM_WORLD_RANK": "5"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (STEP | NODES, ("nid002", "29845")),
        (STEP | {"SLURM_JOB_NODELIST": "nid[001-004]"}, ("nid001", "29845")),
        (STEP | {"SLURM_STEP_NODELIST": "nid007"}, (None, "29845")),  # one machine
        (STEP | NODES | {"MASTER_ADDR": "head", "MASTER_PORT": "1"}, ("head", "1")),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"} | NODES, (None, None)),  # one task: any free port
        (STEP | NODES | MPI, ("nid001", "29845")),  # its daemons' step has not the first host
        (STEP | NODES | {"TORCHELASTIC_RUN_ID": "x"}, (None, None)),
        (NODES, (None, None)),
    ],
)
def test_where_ranks_meet(monkeypatch, env, expected):
    monkeypatch.setattr(rank, "node_address", lambda node, in_slurm: node)
    given = dict(env)
    set_rendezvous(given)
    assert (given.get("MASTER_ADDR"), given.get("MASTER_PORT")) == expected


def test_slurms_address_of_a_node_whose_name_does_not_resolve(monkeypatch):
    monkeypatch.setattr(rank, "node_address", lambda node, in_slurm: "10.0.0.2" if node == "nid002" else None)
    given = STEP | NODES
    set_rendezvous(given)
    assert given["MASTER_ADDR"] == "10.0.0.2"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("hsn", "hsn0"), ("ib,hsn", "hsn0"), ("=hsn1,eth0", "hsn1"), ("=hsn", None), ("^docker,lo", None), ("ens", None)],
)
def test_gloo_takes_the_interface_that_nccl_was_told(asked, expected):
    assert gloo_interface(asked, ["eth0", "hsn0", "hsn1", "lo"]) == expected


def test_what_a_rank_sets_and_what_it_leaves_to_the_user(monkeypatch):
    assert "lo" in usable_interfaces()
    monkeypatch.setattr(rank, "usable_interfaces", lambda: ["eth0", "lo"])
    monkeypatch.setattr(rank, "choose_accelerator", lambda env: None)
    grows = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for given, added in (
        ({}, grows),
        ({"DS_ACCELERATOR": "cpu"}, {}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        ({"NCCL_SOCKET_IFNAME": "eth"}, grows | {"GLOO_SOCKET_IFNAME": "eth0"}),
        ({"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "lo"}, grows),
    ):
        env = dict(given)
        prepare_rank(env)
        assert env == given | added
