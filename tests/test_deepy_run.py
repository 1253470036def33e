"""Real training under deepy.py and torchrun on CPU ranks: the same numbers, and what happens to a disturbed job."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """A test that fails leaves no run behind; deepy.py and torchrun end their ranks."""
    yield
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()


def start(folder: Path, *argv: str, torchrun: int = 0, alone: bool = False, **popen: Any) -> subprocess.Popen[str]:
    """The run under deepy.py, under torchrun with so many ranks, or `python train.py`."""
    head = [sys.executable] if alone else [sys.executable, str(ROOT / "deepy.py")]
    if torchrun:
        head = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(torchrun), "--standalone"]
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    env = {k: v for k, v in os.environ.items() if k not in drop} | {"OMP_NUM_THREADS": "1"}
    command = [*head, str(ROOT / "train.py"), "run.yml", *argv]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **popen}
    _started.append(subprocess.Popen(command, cwd=folder, env=env, **options))
    return _started[-1]


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


def test_ctrl_c_on_a_pipe_saves_and_the_same_command_resumes(folder: Path) -> None:
    """`deepy.py ... 2>&1 | tee log`: Ctrl-C ends tee as well, so that nobody reads the output any more."""
    process = start(folder, "num_gpus=2", "train_iters=100000", stderr=subprocess.STDOUT)
    tee = subprocess.Popen(["tee", "log"], cwd=folder, stdin=process.stdout, stdout=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.close()
    wait_for_step(folder / "run", 2, process)
    for one in (tee, process):
        one.send_signal(signal.SIGINT)
    assert process.wait(timeout=100) == 3 and tee.wait() == -signal.SIGINT
    stopped = status(folder / "run")
    assert (stopped["state"], stopped["exit_code"], stopped["reason"]) == ("ended", 3, "stopped by Ctrl-C")
    rc, text = finish(start(folder, "num_gpus=2", f"train_iters={stopped['step'] + 2}"))
    assert rc == 0, text
    assert f"at step {stopped['step']}" in text  # resuming from ... at step N
    assert list(losses(folder / "run"))[-2:] == [stopped["step"] + 1, stopped["step"] + 2]


def test_ctrl_c_under_torchrun_saves(folder: Path) -> None:
    process = start(folder, "train_iters=100000", torchrun=1, start_new_session=True)
    wait_for_step(folder / "run", 2, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    text = finish(process)[1]
    found = status(folder / "run")
    assert (found["state"], found["exit_code"], found["reason"]) == ("ended", 3, "stopped by Ctrl-C"), text
    assert (folder / "run" / f"global_step{found['step']}").is_dir()


def test_without_the_callback_a_signal_ends_the_run_without_a_checkpoint(folder: Path) -> None:
    process = start(folder, "num_gpus=2", "train_iters=100000", "callbacks.stop_on_signal=false")
    wait_for_step(folder / "run", 2, process)
    process.send_signal(signal.SIGTERM)
    rc, text = finish(process)
    found = status(folder / "run")
    assert (rc, found["state"], found["exit_code"]) == (143, "failed", 143) and "Traceback" not in text, text
    assert "SIGTERM" in found["reason"] and not list((folder / "run").glob("global_step*"))


def test_a_closed_terminal_saves(folder: Path) -> None:
    controller, terminal = pty.openpty()
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}

    def enter_terminal() -> None:
        os.login_tty(0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite may run under nohup

    process = start(folder, "train_iters=100000", alone=True, preexec_fn=enter_terminal, **streams)
    os.close(terminal)
    wait_for_step(folder / "run", 2, process)
    os.close(controller)  # SIGHUP for the process, EIO for what it prints
    assert process.wait(timeout=100) == 3
    found = status(folder / "run")
    assert (found["state"], found["exit_code"], found["reason"]) == ("ended", 3, "stopped by SIGHUP")
    assert (folder / "run" / f"global_step{found['step']}").is_dir()


@pytest.mark.parametrize(("number", "end"), [(signal.SIGKILL, ("failed", 5)), (signal.SIGTERM, ("ended", 3))])
def test_a_start_that_is_ended_says_so(folder: Path, number: signal.Signals, end: tuple[str, int]) -> None:
    """kill -9 of a rank that imports torch, SIGTERM to the launcher: the status was that of the start before."""
    (folder / "run").mkdir()
    before = {"state": "running", "step": 40, "exit_code": None, "reason": None}
    (folder / "run" / "status.json").write_text(json.dumps(before))
    process = start(folder, "num_gpus=2")
    deadline = time.monotonic() + 60
    while len(ranks := ranks_of(process)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(ranks[1] if number == signal.SIGKILL else process.pid, number)
    rc, text = finish(process)
    found = status(folder / "run")
    assert (rc, found["state"], found["exit_code"], found["step"]) == (end[1], *end, 40), text
    assert number.name in found["reason"] and "Traceback" not in text


def test_a_hung_rank_ends_the_job_and_is_named(folder: Path) -> None:
    process = start(folder, "model_parallel_size=2", "train_iters=100000", "watchdog_seconds=4")
    wait_for_step(folder / "run", 5, process)
    begin = time.monotonic()
    os.kill(ranks_of(process)[1], signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)  # cannot be obeyed in a collective, and does not make it wait longer
    rc, text = finish(process)
    assert rc == 5 and 3.9 < time.monotonic() - begin < 30
    found = status(folder / "run")
    assert (found["state"], found["exit_code"]) == ("failed", 5)
    assert re.search(r"no progress for \d+ s: rank 1 of 2 does not answer", found["reason"])
    assert found["reason"] in text.splitlines()[-1]
    loop = 'megatron/training/trainer.py", line'
    assert loop in text and loop in (folder / "run" / "logs" / "rank_1.log").read_text()
