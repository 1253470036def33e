"""The job scripts on a real SLURM: submitted from any folder, one rank per GPU, the pre-flight, any command."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.real.slurm_cluster import Cluster, read_tail

ROOT = Path(__file__).resolve().parents[3]
RANK = """\
import os
print("rank", *(os.environ.get(name) for name in ("SLURM_PROCID", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES")))
"""


def site(slurm: Cluster, folder: Path, text: str) -> str:
    """A profile of the tests' cluster with more in it; returns its path."""
    profile = folder / "site.yml"
    profile.write_text(f"extends: {slurm.name}\n{text}")
    return str(profile)


def test_ranks_follow_the_gpus_and_the_log_is_linked(slurm: Cluster, tmp_path: Path) -> None:
    """The environment of a job as pretrain_neox.sbatch takes it, from a folder that is not Deepy's."""
    lines = (ROOT / "pretrain_neox.sbatch").read_text().splitlines(keepends=True)
    script = tmp_path / "pretrain_neox.sbatch"
    script.write_text("".join(line for line in lines if not line.startswith("exec ")) + "srun python3 rank.py\n")
    (tmp_path / "rank.py").write_text(RANK)
    cluster = site(slurm, tmp_path, f"folders: {{logs: {tmp_path}/logs}}\nexclude_nodes: [a4]\n")
    variables = {"DEEPY_CLUSTER": cluster, "DEEPY_HOME": str(ROOT)}
    expected = {
        ("--nodes=2",): {f"rank {rank} a{1 + rank // 4} 0,1,2,3" for rank in range(8)},
        ("--nodes=2", "--gpus-per-node=2"): {f"rank {rank} a{1 + rank // 2} 0,1" for rank in range(4)},
        ("--ntasks-per-node=3",): {f"rank {rank} a1 0,1,2,3" for rank in range(3)},
        ("--gpus-per-task=1", "--ntasks-per-node=2"): {f"rank {rank} a1 0,1,2,3" for rank in range(2)},
        ("--gpus-per-node=0", "--ntasks-per-node=2"): {f"rank {rank} a1 None" for rank in range(2)},
    }
    for flags, ranks in expected.items():
        job = slurm.submit("--exclude=a4", "--time=1", *flags, str(script), "a.yml", folder=tmp_path, **variables)
        slurm.wait(job, "COMPLETED")
        log = tmp_path / f"neox-training-{job}.out"
        lines = log.read_text().splitlines()
        assert {line for line in lines if line.startswith("rank ")} == ranks, (flags, read_tail(log))
        assert (tmp_path / "logs" / log.name).resolve() == log
        assert any(f"job {job} on a" in line and cluster in line for line in lines), read_tail(log)
        assert any("nodes of the cluster: " in line and "idle" in line for line in lines)


def test_the_preflight_measures_between_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    cluster = site(slurm, tmp_path, "preflight: {bandwidth_gb_s: 100000}\n")
    (tmp_path / "run.yml").write_text("extends: " + str(ROOT / "configs/tiny.yml") + "\n")
    flags = ["--nodes=2", "--gpus-per-node=0", "--ntasks-per-node=1", "--time=10"]
    script = str(ROOT / "pretrain_neox.sbatch")
    job = slurm.submit(*flags, script, "run.yml", "save=run", folder=tmp_path, DEEPY_CLUSTER=cluster)
    facts = slurm.wait(job, "FAILED", timeout=100)
    log = (tmp_path / f"neox-training-{job}.out").read_text()
    assert facts["ExitCode"] == "2:0" and facts["Restarts"] == "0", log
    assert "all-reduce" in log and "GB/s over gloo" in log and f"{cluster}:2" in log
    assert not (tmp_path / "run/status.json").exists()  # nothing was trained


def test_any_command_runs_on_a_node(slurm: Cluster, tmp_path: Path) -> None:
    command = ["sh", "-c", 'echo "$PWD $CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS"; exit 7']
    flags = ["--cpus-per-task=4", "--gpus=2"]
    job = slurm.submit(*flags, str(ROOT / "run_on_compute.sbatch"), *command, folder=tmp_path)
    assert slurm.wait(job, "FAILED")["ExitCode"] == "7:0"
    assert f"{tmp_path} 0,1 1" in (tmp_path / f"run_on_compute_{job}.out").read_text().splitlines()
