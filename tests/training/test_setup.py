"""Which environment names the ranks, their devices and logs, which blocks are compiled, what a lost rank looks like."""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron import log
from megatron.errors import LostRankError, UserError, run_cli
from megatron.model.block import TransformerBlock
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import RankInfo, Topology, ranks_from_environment
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.training import setup, setup_distributed
from megatron.training.compile import wants_compile
from megatron.training.rendezvous import lost_rank
from megatron.training.setup_distributed import (
    launcher_preference,
    open_store,
    raise_file_limit,
    time_limits,
    warn_of_blocking,
)
from tests.distributed import RankFailure, run_distributed
from tests.training.tiny import NEOX, Layout, build, step_batch

pytestmark = pytest.mark.cpu

STALE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}
MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("prefer", "env", "expected"),
    [
        (None, STALE | SLURM | MPI, (0, 0, 1)),
        ("slurm", STALE | SLURM | MPI, (5, 1, 8)),
        ("mpi", STALE | SLURM | MPI, (3, 3, 4)),
        ("mpi", STALE | SLURM, (0, 0, 1)),
        ("slurm", STALE | MPI, (3, 3, 4)),
        ("slurm", STALE, (0, 0, 1)),
        ("slurm", {"RANK": "6", "LOCAL_RANK": "2", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"} | SLURM, (6, 2, 8)),
        (None, {}, (0, 0, 1)),
    ],
)
def test_who_names_the_rank(prefer, env, expected):
    assert ranks_from_environment(env, prefer) == RankInfo(*expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [("", None), ("deepspeed_mpi: true", "mpi"), ("deepspeed_slurm: true", "slurm"), ("x: 1", None)],
)
def test_the_configuration_says_whom_to_prefer(tmp_path, line, expected):
    path = tmp_path / "run.yml"
    path.write_text(f"num_layers: 2\n{line}\n")
    assert launcher_preference([str(path)], []) == expected


def test_a_file_takes_the_messages_of_every_rank(tmp_path, capsys):
    try:
        for rank in (0, 1):
            log.configure(rank, "INFO", tmp_path / "logs" / f"rank_{rank}.log")
            log.get_logger("megatron.x").info(f"from {rank}")
            log.result(f"line of {rank}")
    finally:
        log.configure(0)
    for rank in (0, 1):
        text = (tmp_path / "logs" / f"rank_{rank}.log").read_text()
        assert f"from {rank}" in text and f"line of {rank}" in text
    shown = capsys.readouterr()
    assert "from 0" in shown.err and "from 1" not in shown.err and "line of" not in shown.err
    assert shown.out.splitlines() == ["line of 0", "line of 1"]
    assert not any(isinstance(handler, logging.FileHandler) for handler in logging.getLogger("deepy").handlers)


@pytest.mark.parametrize(
    ("error", "world", "in_order"),
    [(ValueError("boom"), 2, False), (LostRankError("gone"), 2, False), (UserError("bad"), 2, False)]
    + [(UserError("bad"), 1, True), (None, 2, True)],
)
def test_a_rank_that_fails_waits_for_nobody_and_its_log_says_why(tmp_path, monkeypatch, error, world, in_order):
    left = []
    monkeypatch.setattr(setup, "leave_job", lambda: left.append(True))

    def work(process):
        if error is not None:
            raise error
        return 0

    state = SimpleNamespace(topology=SimpleNamespace(world_size=world))
    try:
        log.configure(0, "INFO", tmp_path / "rank_0.log")
        with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
            setup.run(SimpleNamespace(state=state), work)
    finally:
        log.configure(0)
    assert bool(left) == in_order
    if error is not None:
        lines = (tmp_path / "rank_0.log").read_text().splitlines()
        assert lines[-1].endswith(f"{type(error).__name__}: {error}")
        assert any("in work" in line for line in lines) == isinstance(error, ValueError)


def fail_in_a_collective(rank, world, folder):
    """Rank 1 fails while rank 0 waits for it, in a process whose end waits for a minute."""
    log.configure(rank, "INFO", folder / f"rank_{rank}.log")
    state = ParallelState.build(Topology({"pipe": 1, "data": world, "model": 1}), rank, "cpu")
    threading.Thread(target=time.sleep, args=(60,)).start()

    def work(process):
        if rank == 1:
            raise ValueError("boom")
        try:
            dist.all_reduce(torch.ones(9), group=state.group("data"))
        except RuntimeError as error:
            raise lost_rank(error) from error

    with mock.patch.object(dist, "destroy_process_group", lambda: time.sleep(60)):
        run_cli(lambda: setup.run(SimpleNamespace(state=state), work), is_run=True)


def test_a_rank_that_fails_while_others_wait_for_it_is_gone_with_its_traceback(tmp_path):
    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 died \(exit code 1\)") as failure:
        run_distributed(fail_in_a_collective, 2, tmp_path)
    assert time.monotonic() - began < 40
    assert "ValueError: boom" in str(failure.value).split("rank 1: its last output")[1]
    assert "rank 0 died (exit code 5)" in str(failure.value)
    assert "ValueError: boom" in (tmp_path / "rank_1.log").read_text()
    assert "LostRankError: " in (tmp_path / "rank_0.log").read_text()


def place(device, tp=1):
    return SimpleNamespace(device=torch.device(device), tp_size=tp)


def test_compiling_is_for_gpus_unless_asked_for():
    def wants(asked, device):
        return wants_compile(ModelConfig(torch_compile=asked), place(device))

    assert not wants(None, "cpu") and wants(True, "cpu")
    assert wants(None, "cuda") and not wants(False, "cuda")


def test_a_failed_communication_is_a_lost_rank_and_other_errors_are_not():
    gone = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    assert lost_rank(gone).exit_code == 5 and "_timeout" not in str(lost_rank(gone))
    assert lost_rank(RuntimeError("shape mismatch")) is None and lost_rank(ValueError("Broken pipe")) is None


def compiled_blocks(rank, world, keys, layout, backend):
    """How many blocks of this rank's engine are compiled, and the loss of two steps."""
    with mock.patch.object(setup.compile_blocks, "__defaults__", (0, backend)):
        engine, args, lr = build(rank, keys, layout)
    blocks = [m for m in engine.module.modules() if isinstance(m, TransformerBlock)]
    losses = [float(engine.train_batch(step_batch(i, args, engine.state), lr(i)).loss) for i in range(2)]
    return [block._compiled_call_impl is not None for block in blocks], losses


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=lambda x: x.name)
def test_torch_compile_compiles_every_block_and_changes_nothing(layout):
    """Traced by the compiler, run by torch ("aot_eager"): a real back-end needs minutes of C++ on a CPU."""
    plain = run_distributed(compiled_blocks, 2, NEOX, layout, "aot_eager", timeout=110)
    compiled = run_distributed(compiled_blocks, 2, {**NEOX, "torch_compile": True}, layout, "aot_eager", timeout=110)
    for (off, losses), (on, same) in zip(plain, compiled, strict=True):
        assert off and not any(off) and on and all(on)
        assert same == pytest.approx(losses, rel=1e-6)


def limit(monkeypatch, environment=None, **keys):
    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    if environment is not None:
        monkeypatch.setenv("DEEPSPEED_TIMEOUT", environment)
    return time_limits(NeoXArgs.from_saved({**NEOX, **keys})).host


def test_how_long_ranks_wait_on_the_host(monkeypatch):
    assert limit(monkeypatch) == 7200 and limit(monkeypatch, "300") == 18000
    assert limit(monkeypatch, "300", distributed_timeout=9000) == 9000
    assert limit(monkeypatch, distributed_timeout=60, watchdog_seconds=0) == 60
    assert limit(monkeypatch, distributed_timeout=60) > 3600  # the watchdog, which knows whom to blame, comes first
    assert limit(monkeypatch, "") == limit(monkeypatch, " ") == 7200
    for environment in ("soon", "0", "-1", "0.5", "1e9", "9999999"):
        for keys in ({}, {"distributed_timeout": 9000.0}):  # DeepSpeed reads it in any case
            with pytest.raises(UserError, match=f"^DEEPSPEED_TIMEOUT={environment} "):
                limit(monkeypatch, environment, **keys)


def test_a_process_may_open_as_many_files_as_its_limit_allows(monkeypatch, caplog):
    given = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: given.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    raise_file_limit(1000)
    assert given == [(4096, 4096)] and caplog.text == ""
    raise_file_limit(4000)
    assert "4096" in caplog.text and "4000 ranks" in caplog.text


def test_a_host_that_would_wait_for_every_operation_is_warned_of(monkeypatch):
    lines = []
    monkeypatch.setattr(setup_distributed.logger, "warning", lines.append)
    warn_of_blocking({"TORCH_NCCL_BLOCKING_WAIT": "0", "NCCL_BLOCKING_WAIT": "", "NCCL_DEBUG": "INFO"})
    assert not lines
    warn_of_blocking({"TORCH_NCCL_BLOCKING_WAIT": "1"})
    assert len(lines) == 1 and lines[0].startswith("TORCH_NCCL_BLOCKING_WAIT=1")


def test_ranks_on_several_machines_without_an_address_are_refused(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    with pytest.raises(UserError, match=r"MASTER_ADDR .*\b4 of the 8 "):
        open_store(RankInfo(rank=5, local_rank=1, world_size=8))
