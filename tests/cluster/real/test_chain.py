"""Chains of real jobs: time limit, preemption, a dead node, a crash loop, a cancelled job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.jobs.chain import REQUEUE
from tests.cluster.real.slurm_cluster import Cluster, await_true

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[3]
STEPS = 40
SCRIPT = str(ROOT / "pretrain_neox.sbatch")
CONFIG = f"""\
num_layers: 2
hidden_size: 16
num_attention_heads: 2
seq_length: 16
pos_emb: rotary
optimizer: {{type: adam, params: {{lr: 1.0e-3}}}}
train_batch_size: 4
train_micro_batch_size_per_gpu: 2
train_iters: {STEPS}
eval_iters: 0
log_interval: 1
tokenizer_type: CharLevelTokenizer
data_path: tokens
save: run
checkpoint_factor: 10
keep_last_n_checkpoints: 2
plugins: [faults.py]
callbacks: {{slow_steps: true}}
"""
# Steps of a quarter second, so that a fault meets a run that trains.
FAULTS = """\
import os, time
from megatron.callbacks import CALLBACKS
from megatron.training.callback import Callback

@CALLBACKS.register("slow_steps", phase="measure")
class SlowSteps(Callback):
    def before_step(self, trainer):
        if os.path.exists("slow"):
            time.sleep(0.25)
"""
# Ranks that fail before they have imported anything.
FAILING_RANKS = """\
import os
if "SLURM_STEP_ID" in os.environ:
    os.write(2, b"a fault of the test\\n")
    os._exit(1)
"""
RESOURCES = ("--ntasks-per-node=1", "--gpus-per-node=0", "--exclusive", "--time=10")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yml").write_text(CONFIG)
    (tmp_path / "faults.py").write_text(FAULTS)
    numbers = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "tokens", np.uint16) as builder:
        for _ in range(50):
            builder.add_document(numbers.integers(0, 200, size=100))
        builder.finalize()
    return tmp_path


def submit(cluster: Cluster, folder: Path, *flags: str, config: str = "log_interval=1") -> str:
    variables = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return cluster.submit(*RESOURCES, *flags, SCRIPT, "run.yml", config, folder=folder, **variables)


def chain(folder: Path) -> dict[str, Any]:
    file = folder / "run/chain.json"
    return json.loads(file.read_text()) if file.exists() else {"links": []}


def lines(folder: Path, run: str = "run") -> list[dict[str, Any]]:
    file = folder / run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def losses(folder: Path, run: str = "run") -> dict[int, float]:
    return {line["step"]: line["train/lm_loss"] for line in lines(folder, run) if "train/lm_loss" in line}


def await_link(folder: Path, number: int, log: Path, fact: str = "started") -> dict[str, Any]:
    """Wait until this fact is known of link `number` of the chain; returns the link."""

    def there() -> bool:
        links = chain(folder)["links"]
        # What follows is noted as a requeue before it is known whether SLURM refuses that.
        return len(links) >= number and links[number - 1][fact] not in (None, REQUEUE)

    await_true(there, f"{fact} of link {number}", 120, log=log)
    return chain(folder)["links"][number - 1]


def await_steps(folder: Path, since: float, log: Path) -> float:
    """Wait until a step was logged after `since`; returns when the first one was."""
    await_true(lambda: bool(lines(folder)) and lines(folder)[-1]["time"] > since, "a step", 120, log=log)
    return next(line["time"] for line in lines(folder) if line["time"] > since)


def test_a_run_survives_its_time_limit_a_preemption_and_a_dead_node(slurm: Cluster, folder: Path) -> None:
    """One run of four links; the losses are those of a run that nothing disturbed."""
    (folder / "slow").touch()
    job = submit(slurm, folder, "-p", "low", "--nodes=2", "-w", "a1,a2", "--time=1")
    log = folder / f"neox-training-{job}.out"
    await_true(lambda: log.exists() and "starting 2 ranks" in log.read_text(), "a start", 90, log=log)
    # The run knows by now when the job ends; more time is for slow machines.
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    await_link(folder, 1, log, "ended")
    restart(slurm, job, folder, 2, log)

    high = slurm.submit("-p", "high", "--nodes=3", "--exclusive", "-o", "/dev/null", "--wrap", "true", folder=folder)
    await_link(folder, 2, log, "ended")
    slurm.wait(high, "COMPLETED")
    restart(slurm, job, folder, 3, log)

    (folder / "slow").unlink()
    slurm.kill_node("a2")
    whole = submit(slurm, folder, "--nodes=2", "-w", "a3,a4", config="save=whole")
    await_link(folder, 3, log, "ended")
    slurm.wait(job, "PENDING")
    slurm.run("scontrol", "update", f"JobId={job}", "ReqNodeList=")
    slurm.start_now(job)
    slurm.wait(job, "COMPLETED", timeout=120)
    slurm.wait(whole, "COMPLETED", timeout=120)

    one, two, three, four = chain(folder)["links"]
    assert [one["code"], two["code"], four["code"]] == [3, 3, 0], log.read_text()
    assert [link["next"] for link in (one, two, three, four)] == ["requeue", "requeue", "requeue", None]
    assert [link["job_id"] for link in (one, two, three, four)] == [job] * 4
    assert [link["restart"] for link in (one, two, three, four)] == [0, 1, 2, 3]
    assert 0 < one["step"] < two["step"] <= three["step"] < four["step"] == STEPS
    assert "a2" not in four["nodes"] and four["nodes"].startswith("a[")
    assert losses(folder) == losses(folder, "whole") and len(losses(folder)) == STEPS


def restart(slurm: Cluster, job: str, folder: Path, number: int, log: Path) -> None:
    """Start the requeued job as link `number`, and wait until it trains."""
    before = chain(folder)["links"][number - 2]
    slurm.wait(job, "PENDING")
    slurm.start_now(job)
    begun = await_link(folder, number, log)["started"]
    step = await_steps(folder, begun, log)
    print(f"link {number}: {begun - before['ended']:.1f} s after the end before, first step after {step - begun:.1f} s")


def test_a_crash_loop_ends_after_three_jobs_and_leaves_the_node(slurm: Cluster, folder: Path) -> None:
    """A job that may not be requeued has successors with its flags."""
    (folder / "sitecustomize.py").write_text(FAILING_RANKS)
    first = submit(slurm, folder, "--no-requeue", "--nodes=1", "--exclude=a2,a3")
    second = await_link(folder, 1, folder / f"neox-training-{first}.out", "next")["next"]
    third = await_link(folder, 2, folder / f"neox-training-{second}.out", "next")["next"]
    waiting = slurm.job(third)
    assert (waiting["ExcNodeList"], waiting["NumNodes"], waiting["OverSubscribe"]) == ("a[1-3]", "1-1", "NO")
    assert (waiting["JobName"], waiting["TimeLimit"], waiting["WorkDir"]) == ("neox-training", "00:10:00", str(folder))
    await_link(folder, 3, folder / f"neox-training-{third}.out", "ended")
    slurm.wait(third, "FAILED")
    assert [link["code"] for link in chain(folder)["links"]] == [1, 1, 1]
    assert [link["failed_node"] for link in chain(folder)["links"]] == ["a1", "a1", "a4"]
    assert chain(folder)["links"][2]["next"] is None and chain(folder)["excluded"] == ["a1"]
    last = (folder / f"neox-training-{third}.out").read_text().splitlines()[-1]
    assert last.startswith("chain: no further job after link 3, code 1")


def test_a_cancelled_job_has_no_successor(slurm: Cluster, folder: Path) -> None:
    job = submit(slurm, folder, "--nodes=1")
    log = folder / f"neox-training-{job}.out"
    await_true(lambda: log.exists() and "starting 1 rank" in log.read_text(), "a start", 90, log=log)
    slurm.run("scancel", job)
    slurm.wait(job, "CANCELLED")
    assert "chain: no further job after link 1" in log.read_text()
    assert chain(folder)["links"][0]["next"] is None
