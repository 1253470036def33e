"""submit.py over real ssh to real clusters: one is down, one busy, one idle; and the job that it submits trains."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.real.conftest import TwoClusters
from tests.cluster.real.slurm_cluster import Cluster

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
num_layers: 2
hidden_size: 32
num_attention_heads: 2
seq_length: 32
max_position_embeddings: 32
precision: fp32
optimizer: {{type: Adam}}
train_micro_batch_size_per_gpu: 2
train_iters: 2
checkpoint_factor: 2
data_path: {old}/data/x
split: "1,0,0"
save: {old}/runs/r1
tokenizer_type: bytes
"""


@pytest.fixture(scope="module")
def site(two_clusters: TwoClusters, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a clone of Deepy (`deepy`), profiles (`clusters`), data, and where the clusters keep things."""
    folder = tmp_path_factory.mktemp("submit")
    deepy = folder / "deepy"
    for name in ("megatron", "slurm"):
        shutil.copytree(ROOT / name, deepy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for path in [*ROOT.glob("*.py"), ROOT / "pretrain_neox.sbatch"]:
        shutil.copy(path, deepy / path.name)
    git(deepy, "init", "-q")
    commit(deepy)
    own = yaml.safe_load(two_clusters.first.profile.read_text())
    (folder / "clusters").mkdir()
    for number, name in enumerate(("down", "second", "first")):
        keys = {
            "ssh": f"head-{name}",
            "priority": number,
            "nodes": {"pretrain": 1},
            "remap": {f"{folder}/old": str(folder)},
        }
        keys["folders"] = {"repo": f"{folder}/{name} repo"}
        (folder / f"clusters/my-{name}.yml").write_text(yaml.safe_dump(own | keys))
    repo = folder / "first repo"
    repo.mkdir()
    (repo / ".venv").symlink_to(sys.prefix)
    (repo / "megatron").mkdir()  # a clone, in which the environment was made: its code is not that of the job
    (repo / "megatron/__init__.py").write_text("raise SystemExit('this is not the code of the job')\n")
    (folder / "data").mkdir()
    texts = "".join(
        json.dumps({"text": f"text number {number} of a few, long enough " * 3}) + "\n" for number in range(64)
    )
    (folder / "texts.jsonl").write_text(texts)
    command = [sys.executable, str(ROOT / "tools/datasets/preprocess_data.py"), "--input", str(folder / "texts.jsonl")]
    command += ["--output-prefix", str(folder / "data/x"), "--tokenizer-type", "bytes", "--append-eod"]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    for path in (folder / "data").glob("x_text_document*"):
        path.rename(path.with_name(path.name.replace("x_text_document", "x")))
    return folder


def git(deepy: Path, *command: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", "-C", str(deepy), *identity, *command], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(deepy: Path) -> str:
    git(deepy, "add", "-A")
    git(deepy, "commit", "-q", "-m", "x")
    return git(deepy, "rev-parse", "HEAD")


def submit(site: Path, clusters: TwoClusters, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As a user does on his own machine, from another folder, with an outside config."""
    config = site / "run.yml"
    config.write_text(CONFIG.format(old=site / "old"))
    given = ["-c", str(config), "-e", "exp1", "--ssh-config", str(clusters.ssh_config), *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "DEEPY"))}
    return subprocess.run(
        [sys.executable, str(site / "deepy/slurm/submit.py"), *given],
        cwd=site,
        env={**env, "DEEPY_CLUSTERS": str(site / "clusters"), "HF_TOKEN": "hf_" + "x" * 34},
        capture_output=True,
        text=True,
        timeout=90,
    )


def submitted(done: subprocess.CompletedProcess[str], cluster: str) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf"^submitted job (\d+) to {cluster}$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return found[1]


def test_the_idle_cluster_trains_the_commit(two_clusters: TwoClusters, site: Path) -> None:
    first: Cluster = two_clusters.first
    busy = two_clusters.second.submit("--nodes=2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600")
    two_clusters.second.wait(busy, "RUNNING")
    first.run("scontrol", "update", "nodename=a4", "state=drain", "reason=a test")
    try:
        done = submit(site, two_clusters, "--", "--gpus-per-node=0", "--ntasks-per-node=1")
    finally:
        first.run("scontrol", "update", "nodename=a4", "state=resume")
    job = submitted(done, "my-first")
    table = [re.sub(r"\s+", " ", line) for line in done.stdout.splitlines()[:3]]
    assert table == ["my-down 0 unreachable", "my-second 0 busy", "my-first 3 idle <-- SELECTED"]
    assert job in first.run("squeue", "-h", "-o", "%i").split()
    facts = first.wait(job, timeout=90)
    assert facts["JobState"] == "COMPLETED", first.explain(facts)
    resolved = yaml.safe_load((site / "runs/r1/resolved.yml").read_text())
    assert resolved["git_hash"] == git(site / "deepy", "rev-parse", "HEAD")
    assert resolved["data_path"] == f"{site}/data/x" and (site / "runs/r1/global_step2").is_dir()
    two_clusters.second.run("scancel", busy)


def test_a_later_commit_leaves_the_code_of_a_waiting_job_alone(two_clusters: TwoClusters, site: Path) -> None:
    name = ["--cluster", "my-second", "--", "--hold"]
    jobs, commits = [], []
    for text in ("# one\n", "# two\n"):
        with (site / "deepy/train.py").open("a") as file:
            file.write(text)
        if not commits:
            refused = submit(site, two_clusters, *name)
            assert refused.returncode == 2 and "train.py" in refused.stderr and "--allow-dirty" in refused.stderr
        commits.append(commit(site / "deepy"))
        jobs.append(submitted(submit(site, two_clusters, *name), "my-second"))
    for job, at, lines in zip(jobs, commits, (["# one"], ["# one", "# two"])):
        facts = two_clusters.second.job(job)
        tree = site / "second repo/commits" / at
        assert facts["JobState"] == "PENDING" and facts["Command"].startswith(f"{tree}/pretrain_neox.sbatch ")
        assert [line for line in (tree / "train.py").read_text().splitlines() if line in ("# one", "# two")] == lines
    two_clusters.second.run("scancel", *jobs)
