"""Known faults of starting a job: configuration and data that differ between nodes (71, 55), a machine without compiler
or GPU (84)."""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.checkpoint.agreement import broadcast
from megatron.data.order.datasets import build_datasets
from megatron.errors import UserError
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments.derive import Facts
from megatron.neox_arguments.schema_data import DataConfig
from megatron.run.batches import agree_on_data, compare_copies
from megatron.training.rendezvous import share_config
from tests.data.corpus import GOLDEN, write
from tests.distributed import run_distributed
from tests.faults.commands import CONFIG, deepy, make_folder
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu


def shared(folder: Path, iterations: list[int], own_files: bool) -> list[Any]:
    """What each rank gets of `share_config`: the config or the message, rank r having read iterations[r] (0: bad)."""
    store, got = dist.HashStore(), [None] * len(iterations)

    def read(rank: int) -> str:
        if iterations[rank] == 0:
            raise UserError(f"rank {rank} cannot read this")
        where = folder / f"node{rank}"  # each node has its files elsewhere
        where.mkdir(exist_ok=True)
        return derived(where, facts=Facts(num_devices=2), train_iters=iterations[rank]).to_resolved()

    def rank_of_job(rank: int) -> None:
        try:
            got[rank] = share_config(store, rank, len(iterations), lambda: read(rank), own_files)
        except UserError as error:
            got[rank] = str(error)

    threads = [threading.Thread(target=rank_of_job, args=(rank,)) for rank in range(len(iterations))]
    for thread in reversed(threads):  # rank 0 last: the others wait for it
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    return got


def test_all_ranks_use_the_configuration_of_rank_0(tmp_path: Path) -> None:
    """71: by value, so that no path of one node matters on another."""
    first, second = shared(tmp_path, [7, 9], own_files=False)
    assert first == second and '"train_iters": 7' in first
    first, second = shared(tmp_path, [7, 7], own_files=True)
    assert first == second


def test_nodes_with_different_files_stop_and_name_the_keys(tmp_path: Path) -> None:
    _, second = shared(tmp_path, [7, 9], own_files=True)
    assert second.startswith("rank 1 reads another configuration than rank 0; different: ")
    assert "train_iters" in second


def test_a_configuration_that_rank_0_cannot_read_ends_all(tmp_path: Path) -> None:
    assert shared(tmp_path, [0, 7, 7], own_files=True) == ["rank 0 cannot read this"] * 3


def compare_data(rank: int, world: int, folders: list[str], shared_fs: bool) -> str:
    """Each rank on a machine of its own."""
    os.chdir(folders[rank])
    state = ParallelState.build(Topology({"data": world}), rank, "cpu")
    config = DataConfig(data_path="x", split="1", use_shared_fs=shared_fs)
    try:
        datasets = build_datasets(config, seq_length=8, seed=1234, train_samples=6)
        assert datasets.plan.files
        with mock.patch.object(socket, "gethostname", lambda: f"node{rank}"):
            if shared_fs:
                compare_copies(broadcast(datasets, state), state)
            else:
                agree_on_data(datasets, state, shared_fs)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shared_fs", [True, False])
def test_ranks_whose_data_differ_do_not_train(tmp_path: Path, shared_fs: bool) -> None:
    """55: two nodes with a copy of the data each; one copy is older."""
    folders = [str(tmp_path / f"n{node}") for node in range(3)]
    for folder, documents in zip(folders, [GOLDEN, GOLDEN, GOLDEN[::-1]], strict=True):
        write(Path(folder, "x"), documents)
    assert run_distributed(compare_data, 2, folders[:2], shared_fs) == ["", ""]
    for message in run_distributed(compare_data, 2, [folders[0], folders[2]], shared_fs):
        assert "rank 1" in message or "node1" in message
        assert "other data than rank 0" in message


def test_an_index_that_one_node_built_otherwise_is_found(tmp_path: Path) -> None:
    """55: with a cache per node the arrays themselves are compared."""
    config = DataConfig(data_path=write(tmp_path / "x", GOLDEN), split="1")

    def digests() -> tuple[str, str]:
        datasets = build_datasets(config, seq_length=8, seed=1234, train_samples=6)
        return datasets.digest(), datasets.digest(arrays=True)

    before = digests()
    assert digests() == before
    (entry,) = (tmp_path / "index_cache").iterdir()
    damaged = bytearray((entry / "shuffle_idx.npy").read_bytes())
    damaged[-4] ^= 1
    (entry / "shuffle_idx.npy").write_bytes(damaged)
    after = digests()
    assert after[0] == before[0] and after[1] != before[1]


COMPILERS = ("cc", "gcc", "c++", "g++", "clang", "clang++", "nvcc", "ninja")


@pytest.mark.slow
def test_training_on_a_cpu_with_tensor_and_pipeline_parallel_needs_no_compiler(tmp_path: Path) -> None:
    """84: twenty steps on four ranks; every compiler on the path only writes down that it was called."""
    make_folder(tmp_path, CONFIG.replace("train_iters: 2", "train_iters: 20"))
    (tmp_path / "bin").mkdir()
    for name in COMPILERS:
        tool = tmp_path / "bin" / name
        tool.write_text(f"#!/bin/sh\necho {name} $@ >> {tmp_path}/compiled\nexit 1\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    env = {"PATH": path, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    done = deepy(tmp_path, "model_parallel_size=2", "pipe_parallel_size=2", "log_interval=10", timeout=110, **env)
    assert done.returncode == 0, done.stderr
    assert "no GPU: distributed_backend nccl becomes gloo" in done.stderr
    assert "iteration       20/      20" in done.stdout
    assert re.search(r"CharLevelTokenizer: 512 tokens, .*\b0\n", done.stderr)  # 75
    # 86 and 3
    assert re.search(r"\b8 inputs .*targets.* shifted by one .*crosses .*intra_document_masking: true", done.stderr)
    # 56: documents, tokens, weight, samples, epochs
    assert re.search(r"^train +x +20 +800 +1 +20 +0\.2  data/x$", done.stderr, re.MULTILINE)
    assert not (tmp_path / "compiled").exists(), (tmp_path / "compiled").read_text()
    assert not (tmp_path / "extensions").exists()
