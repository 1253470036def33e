"""The jobs that publish a run, on a real SLURM: one at a time, the newest checkpoint first."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.cluster.real.slurm_cluster import Cluster
from tests.jobs.test_publishing import write_checkpoint
from tests.tools.command import ROOT

STEPS = (1, 2, 3)


@pytest.mark.timeout(240)
def test_jobs_of_one_run_follow_each_other_and_do_what_the_command_says(slurm: Cluster, tmp_path: Path) -> None:
    from tests.hub.upload_server import UploadHub

    for step in STEPS:
        write_checkpoint(tmp_path / "runs/mine", step)
    with UploadHub() as hub:
        hub_environment = hub.environment(tmp_path / "home")
        options = ["--upload-neox-only", "--retry-min-wait=0", "--retry-max-wait=0", "--sbatch=--cpus-per-task=1"]
        command = ["bash", str(ROOT / "huggingface/batch_submit_checkpoints.sh"), "mine", "lab", *options]
        out = slurm.run(
            *command,
            folder=tmp_path,
            DEEPY_CHECKPOINTS=str(tmp_path / "runs"),
            DEEPY_CLUSTER="generic",
            **hub_environment,
        )
        ids = [line.split("job ")[1] for line in out.splitlines()]
        assert [line.split(":")[0] for line in out.splitlines()] == ["global_step3", "global_step2", "global_step1"]
        facts = [slurm.wait(job, timeout=200) for job in ids]
        log = "".join(path.read_text() for path in tmp_path.glob("convert_mine-*.out"))
        assert [found["JobState"] for found in facts] == ["COMPLETED"] * 3, log
        assert {found["JobName"] for found in facts} == {"convert_mine"}
        rows = [slurm.accounted(job, "Start", "End")[0] for job in ids]
        # singleton: each starts when the one before has ended
        assert all(later["Start"] >= earlier["End"] for earlier, later in itertools.pairwise(rows)), rows
        branches = hub.models["lab/neox-ckpt-mine"].branches
        assert {name for name, files in branches.items() if "manifest.json" in files} == {
            f"global_step{s}" for s in STEPS
        }
        titles = [line for line in hub.log if "/commit/global_step" in line]
        assert [line.split("/commit/")[1].split()[0] for line in titles] == [
            "global_step3",
            "global_step2",
            "global_step1",
        ]
        assert slurm.run(*command, folder=tmp_path, DEEPY_CHECKPOINTS=str(tmp_path / "runs"), **hub_environment).count(
            "published already"
        ) == len(STEPS)
