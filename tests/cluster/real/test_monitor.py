"""slurm/monitor.py and jobs of a real SLURM in each state. The jobs write run folders as a training does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.real.slurm_cluster import Cluster

ROOT = Path(__file__).resolve().parents[3]
MONITOR = [sys.executable, str(ROOT / "slurm/monitor.py")]
# run.py FOLDER START END THEN: steps START to END, and then "wait", "fail" (and wait), "end" or "requeue" (once)
RUN = """
import json, os, subprocess, sys, time
from pathlib import Path
from megatron.cluster.status import StatusFile
folder, start, end, then = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
if again:
    start, end, then = end - 1, end + 3, "wait"  # from its last checkpoint
folder.mkdir(parents=True, exist_ok=True)
file = StatusFile(folder)
print(f"run {folder.name} starts at iteration {start} of 100, save: {folder}", flush=True)
for step in range(start, end + 1):
    file.write("running", step, 100, start_step=start, activity="training")
    with (folder / "metrics.jsonl").open("a") as metrics:
        numbers = {"train/lm_loss": 9.0 - step / 100, "train/skipped": 0, "train/nan": 0, "runtime/tokens_per_sec": 1e3}
        metrics.write(json.dumps({"step": step, "time": time.time(), **numbers}) + chr(10))
    time.sleep(0.2)
if then == "requeue":
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
if then == "fail":
    file.write_failure(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), end, 100)
if then == "end":
    file.write("ended", end, end, "train_iters reached", 0, start_step=start)
else:
    time.sleep(600)
"""


@pytest.fixture
def submit(slurm: Cluster, tmp_path: Path) -> Callable[..., str]:
    """`submit(name, command, *flags)`: a job in a folder of its own test, its log `NAME-JOB.out`."""
    (tmp_path / "run.py").write_text(RUN)

    def one(name: str, command: str, *flags: str) -> str:
        command = command.replace("train ", f"PYTHONPATH={ROOT} exec {sys.executable} run.py ", 1)
        script = tmp_path / f"{name}.sh"
        script.write_text(f"#!/bin/bash\n{command}\n")
        return slurm.submit(f"--job-name={name}", "--output=%x-%j.out", *flags, str(script), folder=tmp_path)

    return one


def look(slurm: Cluster, folder: Path, *argv: str) -> dict[str, dict]:
    """The rows of the monitor, by job."""
    found = json.loads(slurm.run(*MONITOR, *argv, "--json", folder=folder))
    assert found["notes"] == []
    return {run["job_id"]: run for run in found["runs"]}


def await_row(slurm: Cluster, folder: Path, job: str, check: Callable[[dict], bool]) -> dict:
    deadline = time.monotonic() + 30
    while not check(row := look(slurm, folder, job)[job]):
        assert time.monotonic() < deadline, row
        time.sleep(0.2)
    return row


def test_jobs_in_every_state(slurm: Cluster, submit: Callable[..., str], tmp_path: Path) -> None:
    trains = submit("neox-training", "train runs/good 0 3 wait", "--gpus-per-node=2")
    out_of_memory = submit("neox-training", "train runs/large 0 2 fail")
    no_config = submit("neox-training", "echo 'error: run.yml: there is no such file'; exit 2")
    lost = submit("on_a_node", "sleep 600", "--no-requeue", "--nodelist=a4")
    waits = submit("later", "true", "--begin=now+1hour")
    cancelled = submit("cancelled", "sleep 600")
    done = submit("neox-training", "train runs/done 0 2 end")
    never = submit("never", "true", f"--dependency=afterok:{no_config}")
    slurm.wait(lost, "RUNNING")
    slurm.wait(no_config, "FAILED")
    slurm.run("scontrol", "update", "nodename=a4", "state=down", "reason=test")
    slurm.run("scancel", cancelled)
    slurm.wait(lost, "NODE_FAIL")
    slurm.wait(done, "COMPLETED")
    await_row(slurm, tmp_path, trains, lambda row: row["iteration"] == 3)
    await_row(slurm, tmp_path, out_of_memory, lambda row: row["state"] == "failed")
    await_row(slurm, tmp_path, never, lambda row: row["job_reason"] == "DependencyNeverSatisfied")
    for job in (cancelled, no_config):
        slurm.accounted(job)
    rows = look(slurm, tmp_path, "--all")
    seen = {
        job: (row["job_state"], row["state"], row["action"], [one["kind"] for one in row["problems"]])
        for job, row in rows.items()
    }
    expected = {
        trains: ("RUNNING", "training", "wait", []),
        out_of_memory: ("RUNNING", "failed", "escalate", ["out_of_memory"]),  # crashed, and SLURM does not see it
        no_config: ("FAILED", "failed", "fix", ["bad_config"]),
        lost: ("NODE_FAIL", "failed", "retry", ["node_failure"]),
        waits: ("PENDING", "pending", "wait", []),
        cancelled: ("CANCELLED", "stopped", None, ["cancelled"]),
        done: ("COMPLETED", "done", None, []),
        never: ("PENDING", "pending", "fix", ["dependency_never_satisfied"]),
    }
    assert {job: seen[job] for job in expected} == expected
    row = rows[trains]
    assert (row["experiment"], row["train_iters"], row["start_iteration"], row["gpus"]) == ("good", 100, 0, 2)
    assert row["loss"] == pytest.approx(8.97) and row["log"] == f"{tmp_path}/neox-training-{trains}.out"
    shown = set(look(slurm, tmp_path))
    assert shown >= set(expected) - {cancelled, done} and not shown & {cancelled, done}
    # The log alone names the folder when the monitor is called from elsewhere.
    assert look(slurm, ROOT, trains)[trains]["run_folder"] == str(tmp_path / "runs/good")
    codes = {job: wait(slurm, tmp_path, 3, job) for job in (trains, never, no_config, "999999")}
    assert codes == {trains: 0, never: 4, no_config: 1, "999999": 2}
    assert wait(slurm, tmp_path, 50, trains, "--timeout", "1") == 124


def wait(slurm: Cluster, folder: Path, iterations: int, *argv: str) -> int:
    return slurm.execute(
        *MONITOR, "--wait-iterations", str(iterations), "--watch", "0.5", *argv, folder=folder
    ).returncode


def test_waiting_for_iterations_survives_a_requeue(slurm: Cluster, submit: Callable[..., str], tmp_path: Path) -> None:
    """Four steps, a requeue, and on from the third: the sixth is reached in the second start."""
    job = submit("neox-training", "train runs/again 0 4 requeue", "--open-mode=append")
    command = [*MONITOR, "--wait-iterations", "6", "--watch", "0.3", "--timeout", "60", job]
    options = {"env": slurm.environment, "cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **options) as waiting:
        try:
            deadline = time.monotonic() + 30
            while slurm.job(job)["Restarts"] != "1":
                assert time.monotonic() < deadline, slurm.explain(slurm.job(job))
                time.sleep(0.1)
            slurm.start_now(job)
            out, err = waiting.communicate(timeout=80)
        finally:
            waiting.kill()
    assert waiting.returncode == 0, out + err
    assert re.fullmatch(rf"job {job} has trained [678] iterations .*\n", out)
    assert look(slurm, tmp_path, job)[job]["restarts"] == 1


def test_the_use_of_the_cluster(slurm: Cluster, submit: Callable[..., str], tmp_path: Path) -> None:
    slurm.cancel_all()
    job = submit("gpus", "sleep 600", "--nodes=2", "--gpus-per-node=3")
    slurm.wait(job, "RUNNING")
    submit("more", "true", "--nodes=4", "--gpus-per-node=4", "--exclusive")
    slurm.run("scontrol", "update", "nodename=a4", "state=drain", "reason=test")
    try:
        found = json.loads(slurm.run(*MONITOR, "--cluster", "--json", folder=tmp_path))["cluster"]
    finally:
        slurm.run("scontrol", "update", "nodename=a4", "state=resume")
    assert found["nodes"]["total"] == {"nodes": 4, "gpus": 16, "jobs": 0}
    assert {state: found["nodes"][state]["gpus"] for state in ("idle", "allocated", "down")} == {
        "idle": 6,
        "allocated": 6,
        "down": 4,
    }
    assert found["running"] == {"root": {"nodes": 2, "gpus": 6, "jobs": 1}} and found["pending"]["root"]["gpus"] == 16
    assert "root runs on 6 of 16 GPUs (37.5%" in slurm.run("bash", str(ROOT / "tools/cluster/cluster_status.sh"))
    usage = json.loads(slurm.run(*MONITOR, "--usage", "now-1hours", "--json", folder=tmp_path))["usage"]
    assert set(usage) == {"start", "end", "user", "users", "accounts", "utilization"}  # hours come when they are over
