"""The shell lines of slurm/README.md, run by bash as they stand there, on logs of ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.monitor.runs import train

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```shell\n(.*?)^```$", (ROOT / "slurm/README.md").read_text(), re.MULTILINE | re.DOTALL)
SACCT = """\
4001            RUNNING
4001.batch      RUNNING
4002            RUNNING
4003             FAILED
4004            RUNNING
"""  # sacct --format=JobID,State -n
# Of a job on SLURM 22.05 that was stopped at its time limit and requeued.
FIRST = "job 51398 on a1, cluster first (/site/first.yml)\n"
REQUEUED = """\
slurmstepd-a1: error: *** STEP 51398.0 ON a1 CANCELLED AT 2026-11-29T01:12:31 ***
SIGTERM: saving and stopping after iteration 5942
saved checkpoint checkpoints/tl/global_step5942
training ends at iteration 5942: stopped by SIGTERM
StopRequested: stopped by SIGTERM at iteration 5942 with everything saved; the same command resumes it
srun: error: a1: task 0: Exited with exit code 3
srun: launch/slurm: _step_signal: Terminating StepId=51398.0
checkpoints/tl/status.json: ended at step 5942: stopped by SIGTERM
chain: link 1 of at most 30 ended with code 3 (stopped by SIGTERM): job 51398 is requeued
slurmstepd-a1: error: *** JOB 51398 ON a1 CANCELLED AT 2026-11-29T01:12:33 DUE TO JOB REQUEUE ***
"""
BEGINS = "job 51398 on a2, cluster first (/site/first.yml)\n"
CRASH = "Traceback (most recent call last):\n  File x\nValueError: no\n"


@pytest.fixture
def typed(written: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """`typed(pattern)` runs the block that has it. 4001 trains, 4002 has crashed, 4004 is silent."""
    logs = tmp_path / "logs"
    logs.mkdir()
    for job in ("4001", "4002", "4003", "4004"):
        shutil.copy(written / "running.out", logs / f"neox-training-{job}.out")
    with (logs / "neox-training-4002.out").open("a") as file:
        file.write(CRASH)
    os.utime(logs / "neox-training-4004.out", (0, 1_000_000))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sacct").write_text(f"#!/bin/sh\ncat <<'END'\n{SACCT}END\n")
    (tmp_path / "bin/sacct").chmod(0o755)

    def run(word: str, job: str = "4001") -> list[str]:
        (block,) = [block for block in BLOCKS if re.search(word, block)]
        env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "logs": str(logs), "job": job}
        done = subprocess.run(["bash", "-c", block], env=env, capture_output=True, text=True, timeout=30, check=False)
        assert "syntax" not in done.stderr
        return done.stdout.splitlines()

    return run


def test_training_lines(typed: Callable[..., list[str]]) -> None:
    lines = typed('^grep "iteration')
    steps = [int(found[1]) for line in lines if (found := re.search(r"iteration +(\d+)/", line))]
    assert steps == list(range(1, 8)) and len(BLOCKS) == 5


def test_crashed(typed: Callable[..., list[str]], tmp_path: Path) -> None:
    assert typed("CRASHED") == ["CRASHED: 4002"]
    for job in ("4001", "4002"):  # requeued: its log is continued
        log = tmp_path / f"logs/neox-training-{job}.out"
        log.write_text(FIRST + REQUEUED + BEGINS + log.read_text())
    assert typed("CRASHED") == ["CRASHED: 4002"]
    with (tmp_path / "logs/neox-training-4001.out").open("a") as file:
        file.write(CRASH + "more\n" * 99)
    assert typed("CRASHED") == ["CRASHED: 4001", "CRASHED: 4002"]
    with (tmp_path / "logs/neox-training-4001.out").open("a") as file:
        file.write("more\n")  # it trains on: 100 lines
    assert typed("CRASHED") == ["CRASHED: 4002"]


def test_a_job_begins_with_the_line_that_the_pattern_looks_for() -> None:
    env = {**os.environ, "SLURM_JOB_ID": "51398", "SLURM_JOB_NODELIST": "a2", "DEEPY_CLUSTER": "generic"}
    env |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "1"}
    command = [sys.executable, "slurm/run_module.py", "megatron.jobs.environment", "--training"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("job ")]
    (pattern,) = re.findall("sed '/(.*)/q'", "".join(BLOCKS))
    assert re.search(pattern, line) and re.search(pattern, BEGINS)


def test_a_healthy_log_has_none_of_the_words(written: Path) -> None:
    for name in ("ended.out", "running.out"):
        assert not re.search("traceback|exception|error:", (written / name).read_text(), re.IGNORECASE)


def test_stale(typed: Callable[..., list[str]]) -> None:
    lines = typed("STALE")
    assert [re.fullmatch(r"STALE \(\d{9,} sec\): (\d+)", line)[1] for line in lines] == ["4004"]


def test_progress(typed: Callable[..., list[str]], tmp_path: Path) -> None:
    with (tmp_path / "logs/neox-training-4004.out").open("a") as file:
        file.write(" validation results at iteration 7 | lm_loss value: 3.0 |\n")
    (tmp_path / "logs/neox-training-4002.out").write_text("it starts\n")
    assert typed("exp=") == [f"{job} | ended | 7/10 (70%) | loss=2.000000E+00" for job in ("4001", "4004")]


def test_an_evaluation(typed: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bars are shown after a few seconds; that the harness's line is what a run prints: test_task_evaluator."""
    monkeypatch.setattr("megatron.log.ProgressBar.LINE_SECONDS", 0.0)
    text = train(tmp_path / "run", train_iters=1, eval_interval=1, eval_iters=4)
    log = tmp_path / "logs/neox-training-4005.out"
    log.write_text(text + "Running evaluation harness at iteration 1: lambada\n")
    lines = typed("Running evaluation", "4005")
    assert [line[:16] for line in lines[:3]] == [f"validation: {share}%|" for share in (25, 50, 75)]
    assert lines[-1] == "Running evaluation harness at iteration 1: lambada"
