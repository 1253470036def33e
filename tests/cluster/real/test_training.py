"""Training jobs on a real SLURM: one job each, submitted as a user does. What follows a job is in test_chain.py."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.real.keeper import is_alive
from tests.cluster.real.slurm_cluster import Cluster, read_tail
from tests.faults.commands import CONFIG, deepy, make_folder

pytestmark = pytest.mark.timeout(300)  # a rank imports for seconds, and many for minutes on a busy machine
ROOT = Path(__file__).resolve().parents[3]
LONG = "train_iters: 1000000\nsave: run\nload: run\nlog_interval: 1000\nwatchdog_seconds: 6\n"


@dataclass(frozen=True)
class Job:
    """A submitted job that trains in `folder`, into its `run`."""

    id: str
    folder: Path

    @property
    def status(self) -> dict[str, object]:
        path = self.folder / "run/status.json"
        return json.loads(path.read_text()) if path.is_file() else {"step": 0}

    @property
    def losses(self) -> list[float]:
        lines = (self.folder / "run/metrics.jsonl").read_text().splitlines()
        return [record["train/lm_loss"] for record in map(json.loads, lines) if "train/lm_loss" in record]

    def log(self) -> str:
        return read_tail(self.folder / f"neox-training-{self.id}.out", 1000)


def submit(slurm: Cluster, folder: Path, *inside: str, flags: tuple[str, ...] = (), config: str = LONG) -> Job:
    """`sbatch pretrain_neox.sbatch run.yml` from a folder of the user's, as the only job of its run.

    `inside`: a command in which sbatch is run.
    """
    folder.mkdir(parents=True)
    make_folder(folder, CONFIG.replace("train_iters: 2\n", "") + config)
    script = str(ROOT / "pretrain_neox.sbatch")
    command = (*inside, "sbatch", "--parsable", *flags, script, "run.yml")
    return Job(slurm.run(*command, folder=folder, PYTHONPATH=str(ROOT), MAX_JOB_CHAINS="0").strip(), folder)


def test_two_nodes_train_as_one_machine_does(slurm: Cluster, tmp_path: Path) -> None:
    short = "train_iters: 5\nsave: run\nlog_interval: 1\n"
    # from the shell of another job, whose variables sbatch hands on
    inside = ("srun", "--quiet", "--ntasks=1", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2")
    job = submit(slurm, tmp_path / "job", *inside, flags=("--nodes=2", "--gpus-per-node=2"), config=short)
    here = make_folder(tmp_path, CONFIG.replace("train_iters: 2\n", "") + short)
    alone = deepy(here, "num_gpus=1", "train_micro_batch_size_per_gpu=4")  # the same samples in a step
    assert alone.returncode == 0, alone.stderr
    facts = slurm.wait(job.id, "COMPLETED", timeout=180)
    assert facts["JobName"] == "neox-training" and facts["NumNodes"] == "2", facts
    (row,) = slurm.accounted(job.id, "JobName", "AllocTRES")
    assert row["ExitCode"] == "0:0" and "node=2" in row["AllocTRES"], row
    assert "starting 4 ranks on 2 hosts" in job.log()  # in the folder it was submitted from
    assert len(job.losses) == 5 and job.losses == pytest.approx(Job("", here).losses, rel=1e-5)


def test_a_wrong_config_and_flags_of_the_user(slurm: Cluster, tmp_path: Path) -> None:
    flags = ("--nodes=3", "--time=7", "--job-name=mine", f"--output={tmp_path}/%x.txt", "--ntasks-per-node=1")
    job = submit(slurm, tmp_path / "job", flags=flags, config=LONG + "nmu_layers: 3\n")
    facts = slurm.wait(job.id, "FAILED")
    assert (facts["JobName"], facts["NumNodes"], facts["TimeLimit"]) == ("mine", "3", "00:07:00"), facts
    assert "run.yml:17: " in (tmp_path / "mine.txt").read_text() and "num_layers" in (tmp_path / "mine.txt").read_text()
    assert not (tmp_path / "job" / f"neox-training-{job.id}.out").exists()
    assert slurm.accounted(job.id) == [{"State": "FAILED", "ExitCode": "2:0"}]


Jobs = dict[str, Job]


@pytest.fixture(scope="module")
def running(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Jobs that train side by side until a test ends them, each on nodes of its own."""
    folder = tmp_path_factory.mktemp("running")
    jobs = {"hangs": submit(slurm, folder / "hangs", flags=("--nodes=1", "--gpus-per-node=2"))}
    jobs["cancelled"] = submit(slurm, folder / "cancelled", flags=("--nodes=1", "--gpus-per-node=1"))
    jobs["loses_a_node"] = submit(slurm, folder / "node", flags=("--nodes=2", "--gpus-per-node=1", "--no-requeue"))
    deadline = time.monotonic() + 180
    for job in jobs.values():
        while not job.status["step"]:
            assert time.monotonic() < deadline, slurm.explain(slurm.job(job.id))
            time.sleep(0.2)
    return jobs


def await_end(ranks: list[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in ranks if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.1)


def test_a_rank_that_hangs_ends_the_job_with_5(slurm: Cluster, running: Jobs) -> None:
    job = running["hangs"]
    ranks = slurm.ranks(job.id)
    assert ranks.keys() == {0, 1}
    os.kill(ranks[1], signal.SIGSTOP)
    slurm.wait(job.id, "FAILED")
    await_end(list(ranks.values()))
    assert slurm.accounted(job.id) == [{"State": "FAILED", "ExitCode": "5:0"}]
    status = job.status
    assert (status["state"], status["exit_code"]) == ("failed", 5) and "rank 1 of 2" in str(status["reason"]), status


def test_scancel_saves_and_is_the_end(slurm: Cluster, running: Jobs) -> None:
    job = running["cancelled"]
    ranks = slurm.ranks(job.id)
    slurm.run("scancel", job.id)
    slurm.wait(job.id, "CANCELLED")
    await_end(list(ranks.values()))
    status = job.status
    assert (status["state"], status["exit_code"]) == ("ended", 3), status
    assert (job.folder / f"run/global_step{status['step']}").is_dir()
    (row,) = slurm.accounted(job.id, every_run=True)
    assert row["State"].startswith("CANCELLED"), row


def test_a_node_without_power_ends_the_ranks_of_the_others(slurm: Cluster, running: Jobs) -> None:
    job = running["loses_a_node"]
    ranks = slurm.ranks(job.id)
    facts = slurm.job(job.id)
    hosts = slurm.run("scontrol", "show", "hostnames", facts["NodeList"]).split()
    (lost,) = set(hosts) - {facts["BatchHost"]}
    slurm.kill_node(lost)
    await_end(list(ranks.values()))  # at once, not when SLURM misses the node
    assert (job.status["state"], job.status["exit_code"]) == ("failed", 5), job.status
    slurm.wait(job.id, "NODE_FAIL", "FAILED")
    slurm.start_node(lost)
