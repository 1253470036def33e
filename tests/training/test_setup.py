"""Which environment names the ranks, their devices and logs, which blocks are compiled, what a lost rank looks like."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from megatron import log
from megatron.errors import UserError
from megatron.model.block import TransformerBlock
from megatron.mpu.topology import RankInfo, ranks_from_environment
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.training.compile import wants_compile
from megatron.training.rendezvous import lost_rank
from megatron.training.setup_distributed import launcher_preference, pick_device
from tests.distributed import run_distributed
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


def place(device, tp=1):
    return SimpleNamespace(device=torch.device(device), tp_size=tp)


def test_compiling_is_for_gpus_unless_asked_for():
    def wants(asked, device, zero, tp=1, **keys):
        return wants_compile(ModelConfig(torch_compile=asked, **keys), place(device, tp), zero)

    assert not wants(None, "cpu", 1) and wants(True, "cpu", 1)
    assert wants(None, "cuda", 1) and not wants(False, "cuda", 1)
    assert not wants(None, "cuda", 3)
    assert not wants(None, "cuda", 1, tp=2, hidden_dropout=0.1) and wants(None, "cuda", 1, hidden_dropout=0.1)
    assert not wants(None, "cuda", 1, attention_backend="flash", intra_document_masking=True)
    with pytest.raises(UserError, match=r"torch_compile: true .*zero_optimization\.stage 3"):
        wants(True, "cuda", 3)
    with pytest.raises(UserError, match="hidden_dropout"):
        wants(True, "cpu", 1, tp=2, attention_dropout=0.1)


def test_more_ranks_than_gpus_are_refused_and_the_cpu_can_be_asked_for(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"num_gpus: rank 3 .*\b2\. .*DS_ACCELERATOR=cpu"):
        pick_device(RankInfo(rank=3, local_rank=3, world_size=4))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert pick_device(RankInfo(rank=3, local_rank=3, world_size=4)) == torch.device("cpu")


def test_a_failed_communication_is_a_lost_rank_and_other_errors_are_not():
    gone = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    assert lost_rank(gone).exit_code == 5
    assert lost_rank(RuntimeError("shape mismatch")) is None and lost_rank(ValueError("Broken pipe")) is None


def compiled_blocks(rank, world, keys, layout, backend):
    """How many blocks of this rank's engine are compiled, and the loss of two steps."""
    from unittest import mock

    from megatron.training import setup

    with mock.patch.object(setup.compile_blocks, "__defaults__", (backend,)):
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
