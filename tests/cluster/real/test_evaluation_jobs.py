"""A run on a real SLURM whose checkpoint is evaluated by a job of the low partition while it trains on."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.cluster.real.slurm_cluster import Cluster, read_tail
from tests.faults.commands import CONFIG, make_folder
from tests.inference.local_tasks import write_task

ROOT = Path(__file__).resolve().parents[3]
SCORE = "eval_tasks/local_choice_acc"
RUN = CONFIG.replace(
    "seq_length: 8\nmax_position_embeddings: 8", "seq_length: 64\nmax_position_embeddings: 64"
).replace(
    "train_iters: 2\n",
    """\
train_iters: 1000000
save: run
extra_save_iters: [5]
log_interval: 100
eval_tasks: [local_choice]
eval_tasks_path: [tasks]
eval_interval: 1000000
eval_jobs: slurm
eval_jobs_sbatch: [--partition=low, --gpus-per-node=1]
""",
)


def test_results_come_to_the_run_that_trains_on(slurm: Cluster, tmp_path: Path) -> None:
    make_folder(tmp_path, RUN)
    write_task(tmp_path / "tasks", "local_choice")
    given = {"PYTHONPATH": str(ROOT), "MAX_JOB_CHAINS": "0", "HF_HUB_OFFLINE": "1"}
    flags = ("--nodes=1", "--gpus-per-node=1", f"--output={tmp_path}/run.out")
    job = slurm.submit(*flags, str(ROOT / "pretrain_neox.sbatch"), "run.yml", folder=tmp_path, **given)
    metrics, results = tmp_path / "run/metrics.jsonl", tmp_path / "run/eval_results"
    deadline = time.monotonic() + 120
    while not (lines := scores(metrics)):
        assert slurm.job(job)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), read_tail(tmp_path / "run.out", 60)
        assert time.monotonic() < deadline, read_tail(tmp_path / "run.out", 60)
        time.sleep(0.3)
    at, line = lines[0]
    trained = [json.loads(one)["step"] for one in metrics.read_text().splitlines()[:at]]
    assert line["step"] == 5 and max(trained) > 5  # of its own step, although others are there already
    (evaluation,) = json.loads((results / "jobs.json").read_text())["jobs"].values()
    assert evaluation["state"] == "recorded" and evaluation["job"] != job
    facts = slurm.wait(evaluation["job"], "COMPLETED")
    assert (facts["Partition"], facts["JobName"]) == ("low", "evaluate_run_5"), facts
    found = json.loads((results / "iteration_5.json").read_text())["results"]["local_choice"]["acc,none"]
    assert line[SCORE] == found and (results / "iteration_5/job.out").exists()
    slurm.run("scancel", job)
    slurm.wait(job, "CANCELLED")
    assert len(scores(metrics)) == 1


def scores(path: Path) -> list[tuple[int, dict[str, float]]]:
    """(place, line) of the lines of metrics.jsonl with a score."""
    whole = path.read_text().splitlines() if path.exists() else []
    return [(place, json.loads(line)) for place, line in enumerate(whole) if f'"{SCORE}"' in line]
