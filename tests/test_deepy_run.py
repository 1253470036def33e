"""Real training under deepy.py and torchrun on CPU ranks: the same numbers, and what happens to a disturbed job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens.builder import IndexedDatasetBuilder

pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """\
num_layers: 2
hidden_size: 32
num_attention_heads: 4
seq_length: 32
pos_emb: rotary
optimizer: {type: adam, params: {lr: 1.0e-3}}
train_batch_size: 4
train_micro_batch_size_per_gpu: 2
train_iters: 6
eval_iters: 0
log_interval: 1
tokenizer_type: CharLevelTokenizer
data_path: tokens
save: run
checkpoint_factor: 1000000
lr_decay_iters: 1000
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yml").write_text(CONFIG)
    numbers = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "tokens", np.uint16) as builder:
        for _ in range(50):
            builder.add_document(numbers.integers(0, 200, size=100))
        builder.finalize()
    return tmp_path


def start(folder: Path, *argv: str, torchrun: int = 0) -> subprocess.Popen[str]:
    if torchrun:
        head = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(torchrun), "--standalone"]
    else:
        head = [sys.executable, str(ROOT / "deepy.py")]
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    env = {k: v for k, v in os.environ.items() if k not in drop} | {"OMP_NUM_THREADS": "1"}
    command = [*head, str(ROOT / "train.py"), "run.yml", *argv]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=200)
    return process.returncode, out + err


def losses(run: Path) -> dict[int, float]:
    """Training loss by step, from the run folder's metrics."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["train/lm_loss"] for record in records if "train/lm_loss" in record}


def status(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 150
    while not (run / "metrics.jsonl").exists() or step not in losses(run):
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks that deepy.py started, in the order of the ranks."""
    table = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in table.splitlines()[1:]]
    return sorted(int(pid) for pid, parent in rows if int(parent) == launcher.pid)


def test_four_ranks_under_deepy_and_one_under_torchrun_train_the_same(folder: Path) -> None:
    rc, text = finish(start(folder, "model_parallel_size=2", "pipe_parallel_size=2"))
    assert rc == 0, text
    assert (status(folder / "run")["state"], status(folder / "run")["step"]) == ("ended", 6)
    rc, text = finish(start(folder, "save=other", torchrun=1))
    assert rc == 0, text
    assert "Setting accelerator" not in text  # DeepSpeed warns on every rank unless DS_ACCELERATOR is set
    first, second = losses(folder / "run"), losses(folder / "other")
    assert list(first) == list(second) == [1, 2, 3, 4, 5, 6]
    assert [*first.values()] == pytest.approx([*second.values()], rel=1e-5)


def test_a_killed_rank_ends_the_job_within_seconds(folder: Path) -> None:
    process = start(folder, "num_gpus=2", "train_iters=100000")
    wait_for_step(folder / "run", 2, process)
    victim = ranks_of(process)[1]
    begin = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    rc, text = finish(process)
    assert time.monotonic() - begin < 40
    assert rc == 5 and re.search(r"rank 1 of 2 .*SIGKILL", text.splitlines()[-1])
    assert status(folder / "run")["exit_code"] == 5 and "rank 1 of 2" in status(folder / "run")["reason"]


def test_ctrl_c_saves_and_the_same_command_resumes(folder: Path) -> None:
    process = start(folder, "num_gpus=2", "train_iters=100000")
    wait_for_step(folder / "run", 2, process)
    process.send_signal(signal.SIGINT)
    rc, text = finish(process)
    assert rc == 3, text
    stopped = status(folder / "run")
    assert (stopped["state"], stopped["exit_code"]) == ("ended", 3)
    rc, text = finish(start(folder, "num_gpus=2", f"train_iters={stopped['step'] + 2}"))
    assert rc == 0, text
    assert f"at step {stopped['step']}" in text  # resuming from ... at step N
    assert list(losses(folder / "run"))[-2:] == [stopped["step"] + 1, stopped["step"] + 2]
