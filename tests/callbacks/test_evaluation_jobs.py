"""Evaluations in jobs of their own: submitted once, recorded once at their step, by the run or after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml

from megatron.callbacks.checkpointer import Checkpointer
from megatron.callbacks.evaluation_jobs import EvaluationJobs, record_results
from megatron.callbacks.metrics_file import MetricsFile
from megatron.callbacks.tracker import Tracker
from megatron.checkpoint.find import identity
from megatron.cluster.evaluation_jobs import Evaluation, Evaluations, Submitter, environment_of_evaluation
from megatron.cluster.slurm import OF_TRAINING
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.errors import UserError
from megatron.jobs import evaluation
from megatron.neox_arguments import NeoXArgs
from megatron.training.callback import Callback
from tests.callbacks.fakes import args_of, trainer_of, wandb_rows
from tests.inference.local_tasks import write_task

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
SBATCH = """#!/bin/sh
echo "$@" >> {folder}/calls
env | grep -E '^(SLURM|RANK|DEEPY|CUDA|HF_)' >> {folder}/env
[ ! -e {folder}/broken ] || {{ echo 'sbatch: error: Invalid qos' >&2; exit 1; }}
wc -l < {folder}/calls
"""
SQUEUE = "#!/bin/sh\n[ ! -e {folder}/queue ] || cat {folder}/queue\n"


class FakeSlurm:
    """sbatch numbers its jobs from 1; squeue knows those of `queue`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, programs = folder, folder / "bin"
        programs.mkdir(parents=True)
        for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
            (programs / name).write_text(text.format(folder=folder))
            (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "777")
        monkeypatch.setenv("SLURM_NTASKS", "8")
        monkeypatch.setenv("RANK", "0")
        self.queue("1", "2", "3", "4", "5")

    def queue(self, *jobs: str) -> None:
        fields = "{0},{0},x,me,lab,main,RUNNING,None,1,a1,0:01,1:00,N/A,cpu=1,0,/w,c,o,(null),(null),\n"
        text = "".join(fields.format(job).replace(",", "\x1f") for job in jobs)
        (self.folder / "queue").write_text(text)

    def calls(self) -> list[list[str]]:
        file = self.folder / "calls"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def steps(self) -> list[int]:
        return [int(call[-2]) for call in self.calls()]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


def finish(run: Path, step: int, score: float = 0.5) -> None:
    """What a job leaves."""
    file = Evaluations(run).results(step)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"results": {"mine": {"acc,none": score, "alias": "mine"}}, "groups": {}}))


def scores(run: Path) -> list[tuple[int, float]]:
    """(step, score) of the lines of metrics.jsonl with one, in their order."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["eval_tasks/mine_acc"]) for record in records if "eval_tasks/mine_acc" in record]


class At(Callback):
    """Does something after a step, before the callbacks that follow."""

    def __init__(self, **actions: Callable[[], Any]) -> None:
        self.actions = {int(name.removeprefix("step")): action for name, action in actions.items()}

    def after_step(self, trainer: Any, out: Any) -> None:
        self.actions.get(trainer.step, lambda: None)()


def train(run: Path, at: At | None = None, every: int = 1, most: int = 4, start: int = 0, **keys: Any) -> Any:
    """A run of ten steps with a checkpoint every second one."""
    jobs = EvaluationJobs(Submitter("slurm", Evaluations(run), ["--qos=low"]), every, most, poll=1)
    # What SLURM is told is told before the next step, so that the test knows when.
    settle = At(**{f"step{step}": jobs._wait for step in range(1, 11)})
    callbacks = [at or At(), Checkpointer(run, {}), settle, jobs, MetricsFile(run / "metrics.jsonl")]
    trainer = trainer_of(callbacks, checkpoint_factor=2, **keys)
    trainer.step = start
    trainer.run()
    return trainer


def states(run: Path) -> dict[int, str]:
    return {step: one.state for step, one in Evaluations(run).read().items()}


def test_each_checkpoint_is_submitted_once_with_the_user_s_flags_last(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = tmp_path / "my run"
    train(run)
    assert slurm.steps() == [2, 4, 6, 8, 10]
    text = (slurm.folder / "calls").read_text().splitlines()[0]
    assert f"--output={run}/eval_results/iteration_2/job.out" in text and f"--chdir={Path.cwd()}" in text
    given = f"{run} 2 --checkpoint={identity(run / 'global_step2')}"
    assert text.endswith(f"--qos=low {ROOT}/slurm/evaluate.sbatch {given}")
    given = (slurm.folder / "env").read_text()
    assert "SLURM_JOB_ID" not in given and "SLURM_NTASKS" not in given and "RANK" not in given
    assert f"DEEPY_HOME={ROOT}" in given and f"DEEPY_PYTHON={sys.executable}" in given


@pytest.mark.parametrize(("every", "expected"), [(4, [2, 6, 10]), (5, [2, 8, 10]), (0, [10]), (100, [2, 10])])
def test_checkpoints_are_so_many_steps_apart_and_the_last_is_always_evaluated(
    tmp_path: Path, slurm: FakeSlurm, every: int, expected: list[int]
) -> None:
    train(tmp_path / "run", every=every)
    assert slurm.steps() == expected


def test_results_are_recorded_at_their_own_step_and_once_over_starts(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = tmp_path / "run"
    at = At(step5=lambda: finish(run, 2, 0.25), step7=lambda: (finish(run, 4, 0.5), finish(run, 6, 0.75)))
    trainer = train(run, at)
    assert scores(run) == [(2, 0.25), (4, 0.5), (6, 0.75)]
    assert states(run) == {2: "recorded", 4: "recorded", 6: "recorded", 8: "submitted", 10: "submitted"}
    held = trainer.held_checkpoints["evaluation_jobs"]
    assert held >= {8, 10} and not held & {2, 4, 6}
    finish(run, 8)  # after the end
    train(run, start=10)
    assert scores(run)[3:] == [(8, 0.5)] and slurm.steps() == [2, 4, 6, 8, 10]


def test_a_run_killed_between_recording_and_noting_it_records_nothing_twice(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = tmp_path / "run"
    train(run, At(step5=lambda: finish(run, 2)))
    evaluations = Evaluations(run)
    with evaluations.change() as jobs:
        jobs[2] = Evaluation("submitted", "1")
    train(run, start=10)
    assert scores(run) == [(2, 0.5)] and states(run)[2] == "recorded"


def test_a_checkpoint_is_kept_until_it_is_evaluated(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = tmp_path / "run"
    train(run, At(step5=lambda: finish(run, 2)), keep_last_n_checkpoints=1, most=2)
    kept = sorted(int(path.name.removeprefix("global_step")) for path in run.glob("global_step*"))
    found = Evaluations(run).read()
    assert kept == [4, 6, 10] and {step: one.state for step, one in found.items()} == {
        2: "recorded",
        4: "submitted",
        6: "submitted",
        8: "skipped",
        10: "submitted",
    }
    assert found[8].reason is not None and "4, 6" in found[8].reason and "eval_jobs_most" in found[8].reason


def test_what_fails_is_a_warning(
    tmp_path: Path, slurm: FakeSlurm, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch that refuses, a job that vanishes, results that are none, a tracker that raises."""
    import logging

    monkeypatch.setattr(logging.getLogger("deepy"), "propagate", True)
    run = tmp_path / "run"
    broken = slurm.folder / "broken"
    at = At(
        step1=lambda: broken.write_text(""),
        step3=lambda: (broken.unlink(), slurm.queue("2", "3", "4", "5")),
        step5=lambda: slurm.queue("4", "5"),
        step7=lambda: Evaluations(run).results(6).write_text("{}"),
    )
    train(run, at)
    found = Evaluations(run).read()
    assert {step: one.state for step, one in found.items()} == {
        2: "failed",
        4: "failed",
        6: "failed",
        8: "submitted",
        10: "submitted",
    }
    reasons = {step: one.reason or "" for step, one in found.items()}
    assert "Invalid qos" in reasons[2] and "left no results" in reasons[4] and "cannot be read" in reasons[6]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all(any(f"iteration {step} " in text for text in warned) for step in (2, 4, 6))

    class Raises(Tracker):
        def write(self, metrics: dict[str, float], step: int) -> None:
            raise RuntimeError("no network")

    class Takes(Tracker):
        taken: list[int] = []

        def write(self, metrics: dict[str, float], step: int) -> None:
            self.taken.append(step)

    finish(run, 8)
    assert record_results(Evaluations(run), [Raises(), Takes()]) == []
    assert record_results(Evaluations(run), [Takes()]) == [8] and Takes.taken == [8]


def test_a_start_submits_what_was_lost_with_the_last_one(tmp_path: Path, slurm: FakeSlurm) -> None:
    """A job that is gone, and the checkpoint of a run that was killed before it could submit it."""
    run = tmp_path / "run"
    train(run, train_iters=4)
    evaluations = Evaluations(run)
    with evaluations.change() as jobs:
        del jobs[4]
    slurm.queue()
    trainer = trainer_of([jobs_of := EvaluationJobs(Submitter("slurm", evaluations), 1, 4, poll=1)])
    trainer.step = trainer.saved_step = 4
    jobs_of.loaded(trainer)
    jobs_of._wait()
    assert slurm.steps() == [2, 4, 2, 4] and trainer.held_checkpoints == {"evaluation_jobs": {2, 4}}
    evaluations.file.write_text("{damaged")
    assert evaluations.read() == {}


def test_a_checkpoint_that_replaces_one_after_going_back_is_evaluated_for_itself(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    run = tmp_path / "run"
    train(run, At(step3=lambda: finish(run, 2, 0.1), step5=lambda: finish(run, 4, 0.2)), train_iters=6)
    finish(run, 6, 0.3)  # recorded by the next start, which begins before it
    train(run, At(step5=lambda: finish(run, 4, 0.7)), start=2, train_iters=6)
    assert slurm.steps() == [2, 4, 6, 4, 6] and states(run) == {2: "recorded", 4: "recorded", 6: "submitted"}
    assert scores(run) == [(2, 0.1), (4, 0.2), (4, 0.7)] and not Evaluations(run).results(6).exists()


def job(run: Path, step: int, score: float, *flags: str, meanwhile: Callable[[], Any] = lambda: None) -> bool:
    """The job of a checkpoint, but for eval.py itself; whether that is started."""
    started = []

    def evaluate(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        (prefix,) = (one.partition("=")[2] for one in command if one.startswith("eval_results_prefix="))
        text = json.dumps({"results": {"mine": {"acc,none": score, "alias": "mine"}}, "groups": {}})
        Path(f"{prefix}_eval_results_now.json").write_text(text)
        meanwhile()
        return subprocess.CompletedProcess(command, 0)

    with mock.patch.object(evaluation, "subprocess", SimpleNamespace(run=evaluate)):
        assert evaluation.main([str(run), str(step), *flags]) == 0
    return bool(started)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_job_of_a_checkpoint_that_the_run_went_back_from_reports_nothing(
    tmp_path: Path, slurm: FakeSlurm, by_hand: bool
) -> None:
    run = tmp_path / "run"
    train(run, train_iters=4)
    old = () if by_hand else (slurm.calls()[-1][-1],)
    # It is asked for again while its job works, and replaced.
    assert job(run, 4, 0.1, *old, meanwhile=lambda: train(run, start=2, train_iters=4, save=str(run)))
    assert slurm.steps() == [2, 4, 4] and scores(run) == [] and not Evaluations(run).results(4).exists()
    assert states(run)[4] == "submitted"
    new = slurm.calls()[-1][-1]
    assert by_hand or not job(run, 4, 0.2, *old)  # it waited in the queue until now
    assert job(run, 4, 0.3, new) and scores(run) == [(4, 0.3)] and states(run)[4] == "recorded"
    # The run goes back, and its next checkpoint of that step is still to come.
    assert train(run, start=2, train_iters=3).step == 3 and 4 not in states(run)
    assert not job(run, 4, 0.4, *(() if by_hand else (new,))) and len(scores(run)) == 1


def test_a_site_s_own_command_submits(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.yml").write_text("submit_command: site_sbatch --check\n")
    monkeypatch.setenv("DEEPY_CLUSTERS", str(tmp_path))
    monkeypatch.setenv("DEEPY_CLUSTER", "site")
    (slurm.folder / "bin/sbatch").rename(slurm.folder / "bin/site_sbatch")
    assert Submitter("slurm", Evaluations(tmp_path / "run")).submit(3, 77) == "1"
    assert slurm.calls()[0][:2] == ["--check", "--parsable"]


def test_keys_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text("eval_jobs: slurm\neval_jobs_sbatch: [partition]\neval_jobs_most: 0\n")
    with pytest.raises(UserError) as caught:
        NeoXArgs.from_ymls([str(path)])
    for line, key in ((1, "eval_tasks"), (1, "save"), (2, "partition"), (3, "at least 1")):
        assert any(f"run.yml:{line}" in one and key in one for one in str(caught.value).splitlines()), key
    assert args_of(eval_jobs="local", eval_tasks=["a"], save="x").generation.eval_jobs_most == 4


def test_the_environment_of_a_job_that_is_submitted() -> None:
    env = {
        "SLURM_NTASKS": "2",
        "SLURM_CONF": "/c",
        "SBATCH_ACCOUNT": "lab",
        "LOCAL_RANK": "1",
        "WANDB_SERVICE": "/tmp/socket",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    of_slurm = environment_of_evaluation({**env, "HF_TOKEN": "t"}, of_slurm=True)
    assert {"SLURM_CONF", "SBATCH_ACCOUNT", "HF_TOKEN"} <= of_slurm.keys()
    assert not {"SLURM_NTASKS", "LOCAL_RANK", "WANDB_SERVICE", "CUDA_VISIBLE_DEVICES"} & of_slurm.keys()
    assert environment_of_evaluation(env, of_slurm=False)["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize("of_slurm", [True, False])
def test_an_evaluation_may_ask_the_hub_unless_the_user_says_no(of_slurm: bool) -> None:
    """`hub_offline` of a profile is for the many ranks of a training job."""
    env = {"HF_HUB_OFFLINE": "1", OF_TRAINING: "HF_HUB_OFFLINE"}
    assert not env.keys() & environment_of_evaluation(env, of_slurm=of_slurm).keys()
    assert environment_of_evaluation({"HF_HUB_OFFLINE": "1"}, of_slurm=of_slurm)["HF_HUB_OFFLINE"] == "1"


# ---- real ones

RUN = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 64,
    "train_iters": 4,
    "optimizer": {"type": "adam", "params": {"lr": 1e-3}},
    "train_batch_size": 2,
    "eval_iters": 0,
    "train_micro_batch_size_per_gpu": 2,
    "tokenizer_type": "CharLevelTokenizer",
    "data_path": "tokens",
    "save": "run",
    "checkpoint_factor": 2,
    "log_interval": 1,
    "eval_interval": 1,
    "eval_jobs": "local",
    "eval_tasks": ["local_choice"],
    "eval_tasks_path": ["tasks"],
    "keep_last_n_checkpoints": 1,
    "tensorboard_dir": "tb",
    "use_wandb": True,
}


@pytest.mark.slow
@pytest.mark.timeout(600)  # the jobs take as long as the machine needs
def test_a_real_run_is_evaluated_beside_and_after_it_with_the_scores_of_eval(tmp_path: Path) -> None:
    """deepy.py with local jobs: the first evaluation ends after the run, so the jobs record; nothing is there twice."""
    with IndexedDatasetBuilder(tmp_path / "tokens", np.uint16) as builder:
        for _ in range(20):
            builder.add_document(np.arange(90) % 50)
        builder.finalize()
    write_task(tmp_path / "tasks", "local_choice")
    (tmp_path / "run.yml").write_text(yaml.safe_dump(RUN))
    (tmp_path / "megatron").mkdir()  # of another clone, such as the one that the user switches from
    (tmp_path / "megatron/__init__.py").write_text("raise SystemExit('another megatron was imported')\n")
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in drop} | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = [sys.executable, str(ROOT / "deepy.py")]
    done = subprocess.run(
        [*command, str(ROOT / "train.py"), "run.yml"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    run, evaluations = tmp_path / "run", Evaluations(tmp_path / "run")
    assert not evaluations.results(4).exists() and "iterations 2, 4 go on" in done.stderr
    local = Submitter("local", evaluations)
    while waited := [one.job for one in evaluations.read().values() if one.state == "submitted" and one.job]:
        working = local.running(waited)
        lost = not working and "submitted" in states(run).values()
        assert not lost, [evaluations.log(step).read_text()[-2000:] for step in (2, 4)]
        time.sleep(0.5)
    assert states(run) == {2: "recorded", 4: "recorded"} and (run / "global_step2").exists()
    name = "eval_tasks/local_choice_acc"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line[name] for line in lines if name in line}
    assert sorted(found) == [2, 4] and len([line for line in lines if name in line]) == 2
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert {event.step: event.value for event in events.Scalars(name)} == pytest.approx(found)
    records = [*run.glob("wandb/offline-run-*/run-*.wandb")]
    assert len(records) > 1 and len({record.name for record in records}) == 1  # of one run of W&B

    def in_wandb() -> dict[int, float]:
        rows = [row for record in records for row in wandb_rows(record)]
        return {row["evaluated_iteration"]: row[name] for row in rows if name in row}

    while in_wandb() != found:  # W&B's own process writes its file, and may come to it late
        time.sleep(0.1)
    asked = [
        *command,
        str(ROOT / "eval.py"),
        "run.yml",
        "iteration=4",
        "eval_results_prefix=by_hand",
        "tensorboard_dir=null",
        "use_wandb=false",
    ]
    done = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (by_hand,) = tmp_path.glob("by_hand_eval_results_*.json")
    results = json.loads(by_hand.read_text())["results"]
    assert results == json.loads(evaluations.results(4).read_text())["results"]
    assert results["local_choice"]["acc,none"] == found[4]
