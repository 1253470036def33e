"""Which GPU a rank takes, what DeepSpeed is told, and two ranks on one GPU. A stand-in for torch's view of GPUs."""

from __future__ import annotations

import contextlib
import os
import sysconfig
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron.errors import UserError
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import RankInfo, Topology
from megatron.training import setup_device
from megatron.training.setup_device import (
    can_compile,
    pick_device,
    refuse_shared_gpus,
    shared_gpu,
    warn_of_few_cores,
)
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(count)`: so many are visible; returns the numbers that were set."""
    chosen = []
    for name in ("DS_ACCELERATOR", "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def show(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        return chosen

    return show


@pytest.mark.parametrize(("visible", "local", "index"), [(4, 3, 3), (4, 0, 0), (1, 0, 0), (1, 3, 0)])
@pytest.mark.parametrize("launcher", [{}, {"LOCAL_RANK": "7", "OMPI_COMM_WORLD_LOCAL_RANK": "7"}])
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one(monkeypatch, gpus, visible, local, index, launcher):
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    chosen = gpus(visible)
    assert pick_device(RankInfo(rank=local, local_rank=local, world_size=4)) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)] and os.environ["LOCAL_RANK"] == str(index)
    assert os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", str(index)) == str(index)  # DeepSpeed compares them


def test_more_ranks_than_gpus_are_refused_and_the_cpu_can_be_asked_for(monkeypatch, gpus):
    gpus(2)
    with pytest.raises(UserError, match=r"num_gpus: rank 3 .*\b2\. .*DS_ACCELERATOR=cpu"):
        pick_device(RankInfo(rank=3, local_rank=3, world_size=4))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert pick_device(RankInfo(rank=3, local_rank=3, world_size=4)) == torch.device("cpu")


def test_two_ranks_on_one_gpu_are_named_with_their_host():
    assert shared_gpu([("a", "x"), ("a", "y"), ("b", "x2"), ("b", "y2")]) is None
    assert shared_gpu([("a", None), ("a", None)]) is None
    message = shared_gpu([("a", "x"), ("a", "y"), ("b", "z"), ("b", "z")])
    assert message is not None and message.startswith("ranks 2, 3 use the same GPU of b (z); 2 ranks run there")
    assert "num_gpus" in message and "CUDA_VISIBLE_DEVICES" in message


def one_gpu_for_all(rank, world):
    state = ParallelState.build(Topology({"pipe": 1, "data": world, "model": 1}), rank, "cpu")
    here = SimpleNamespace(
        device=torch.device("cuda", 0), host=state.host, topology=state.topology, doing=state.doing, rank=rank
    )
    with mock.patch.object(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1")):
        try:
            refuse_shared_gpus(here)
        except UserError as error:
            return str(error)


def test_every_rank_refuses_before_anything_is_asked_of_the_gpu():
    for message in run_distributed(one_gpu_for_all, 2):
        assert message is not None and "ranks 0, 1 use the same GPU" in message and "GPU-1" in message


def without_compiler(rank, world, missing):
    """What a rank decides and logs when rank 1's machine lacks a part of it, and what it raises when it is asked to."""
    state = ParallelState.build(Topology({"pipe": 1, "data": world, "model": 1}), rank, "cpu")
    here = SimpleNamespace(**{**vars(state), "device": torch.device("cuda", 0)})
    lines = []
    with mock.patch.object(setup_device.logger, "warning", lines.append):
        with mock.patch.dict(os.environ), contextlib.ExitStack() as stack:
            os.environ.pop("CC", None)
            if rank == 1 and missing == "Python.h":
                stack.enter_context(mock.patch.object(sysconfig, "get_path", lambda *scheme: "/nowhere"))
            elif rank == 1:
                os.environ.update({"CC": "/nowhere/cc"} if missing == "CC" else {"PATH": "/nowhere"})
            answer = can_compile(None, here)
            try:
                can_compile(True, here)
            except UserError as error:
                return answer, lines, str(error)
    return answer, lines, None


@pytest.mark.parametrize(
    ("missing", "named"), [("gcc", "no gcc or clang"), ("CC", "no /nowhere/cc (CC)"), ("Python.h", "/nowhere/Python.h")]
)
def test_one_machine_without_a_compiler_and_no_rank_compiles(missing, named):
    (first, lines, error), (second, quiet, other) = run_distributed(without_compiler, 2, missing)
    assert (first, second, quiet) == (False, False, []) and error == other
    assert len(lines) == 1 and named in lines[0] and named in error and "torch_compile: true" in error


def test_a_rank_that_feeds_a_gpu_with_few_cores_says_so_once(monkeypatch):
    lines = []
    monkeypatch.setattr(setup_device.logger, "warning", lines.append)
    for cores, device, rank in ((1, "cuda", 0), (4, "cuda", 0), (1, "cuda", 1), (1, "cpu", 0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        warn_of_few_cores(SimpleNamespace(device=torch.device(device), rank=rank))
    assert len(lines) == 1 and "1 of " in lines[0] and "--cpus-per-task" in lines[0]
