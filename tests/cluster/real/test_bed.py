"""The test bed itself: jobs with GPUs and codes, ssh heads, and an end that leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.real.conftest import TwoClusters
from tests.cluster.real.keeper import is_alive
from tests.cluster.real.slurm_cluster import Cluster

ROOT = Path(__file__).resolve().parents[3]


def test_jobs_have_gpus_codes_and_accounting(slurm: Cluster, tmp_path: Path) -> None:
    command = "srun bash -c 'echo $SLURMD_NODENAME:$CUDA_VISIBLE_DEVICES'; exit 7"
    resources = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", f"--output={tmp_path}/out"]
    job = slurm.submit(*resources, "--wrap", command)
    facts = slurm.wait(job)
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "7:0"), slurm.explain(facts)
    assert sorted((tmp_path / "out").read_text().split()) == ["a1:0,1", "a2:0,1"]
    (row,) = slurm.accounted(job, "AllocTRES")
    assert row["State"] == "FAILED" and row["ExitCode"] == "7:0" and "gres/gpu=4" in row["AllocTRES"]


def test_ssh_reaches_each_head(two_clusters: TwoClusters) -> None:
    ssh = ["ssh", "-F", str(two_clusters.ssh_config)]
    for alias, nodes in {"head-first": 4, "head-second": 2}.items():
        done = subprocess.run(
            [*ssh, alias, "sinfo -h -p main -t idle -o %D"], capture_output=True, text=True, timeout=30
        )
        assert done.stdout.split() == [str(nodes)], done
    assert subprocess.run([*ssh, "head-down", "true"], capture_output=True, timeout=30).returncode == 255


def test_daemons_and_what_they_started_end_with_a_killed_test_run(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from tests.cluster.real.keeper import Keeper
with Keeper() as keeper:
    # a daemon whose child is in a session of its own and has lost its parent, as slurmstepd
    keeper.start(["sh", "-c", "(setsid sleep 600 & echo $!); exec sleep 601"], {dict(os.environ)!r}, Path("log"))
    while len(Path("log").read_text().split()) < 1:
        pass
    print(Path("log").read_text(), flush=True)
    keeper._process.wait()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment, stdout=-1) as run:
        orphan = int(run.stdout.readline())
        assert is_alive(orphan)
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_alive(orphan):
        assert time.monotonic() < deadline
        time.sleep(0.05)
