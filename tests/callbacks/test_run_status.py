"""status.json through the life of a run, resolved.yml, and the order of the callbacks."""

from __future__ import annotations

import json
import os

import pytest
import yaml

from megatron.callbacks import RunContext, build_callbacks, run_status
from megatron.callbacks.run_status import RunStatus
from megatron.cluster.status import StatusFile, run_folder
from megatron.errors import LostRankError, NumericsError
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.differences import differences_for
from tests.callbacks.fakes import Log, args_of, batches, trainer_of

pytestmark = pytest.mark.cpu


def status(folder):
    return json.loads((folder / "status.json").read_text())


class Peeks(Log):
    """Reads the status after each hook that may have written it."""

    def __init__(self, folder, fails_at=None):
        super().__init__()
        self.folder, self.fails_at, self.seen = folder, fails_at, []

    def start(self, trainer):
        self.seen.append(status(self.folder))

    def loaded(self, trainer):
        self.seen.append(status(self.folder))

    def after_step(self, trainer, out):
        self.seen.append(status(self.folder))
        if trainer.step == self.fails_at:
            raise NumericsError("the loss is bad")


def test_states_of_a_run_that_ends_well(tmp_path, monkeypatch):
    monkeypatch.setattr(run_status, "HEARTBEAT_SECONDS", 0.0)
    peeks = Peeks(tmp_path)
    trainer_of([RunStatus(tmp_path), peeks], train_iters=2).run()
    assert [(s["state"], s["step"]) for s in peeks.seen] == [
        ("starting", 0),
        ("running", 0),
        ("running", 1),
        ("running", 2),
    ]
    beats = [s["heartbeat"] for s in peeks.seen]
    assert beats == sorted(beats) and beats[-1] > beats[0]
    end = status(tmp_path)
    assert (end["state"], end["step"], end["train_iters"], end["exit_code"]) == ("ended", 2, 2, 0)
    assert (end["reason"], end["pid"], end["version"]) == ("train_iters reached", os.getpid(), 1)


def test_it_says_of_which_job_the_run_is_and_what_takes_long(tmp_path, monkeypatch):
    """While an evaluation or a checkpoint lasts the file names it at once: the next sign may be an hour off."""
    monkeypatch.setenv("SLURM_JOB_ID", "4007")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    seen = []

    class Long(Log):
        def after_step(self, trainer, out):
            for activity in ("evaluation", "checkpoint"):
                with trainer.progress.during(activity):
                    seen.append(status(tmp_path))
            seen.append(status(tmp_path))

    trainer = trainer_of([RunStatus(tmp_path), Long()], train_iters=6)
    trainer.step = 5
    trainer.run()
    assert [one["activity"] for one in seen] == ["evaluation", "checkpoint", "training"]
    assert {(one["start_step"], one["job_id"], one["restart"]) for one in seen} == {(5, "4007", 2)}
    assert 0 <= seen[0]["heartbeat"] - seen[0]["started"] < 60
    end = status(tmp_path)
    assert (end["activity"], end["start_step"], end["step"]) == (None, 5, 6)
    StatusFile(tmp_path).write_failure(NumericsError("bad"), 6, 10)
    assert (status(tmp_path)["start_step"], status(tmp_path)["state"]) == (5, "failed")


def test_a_job_that_is_restarted_keeps_where_it_began(tmp_path, monkeypatch):
    def start(step):
        StatusFile(tmp_path).write("starting", 0, 10)
        trainer = trainer_of([RunStatus(tmp_path)], train_iters=step + 1)
        trainer.step = step
        trainer.run()
        return status(tmp_path)["start_step"], status(tmp_path)["first_step"]

    monkeypatch.setenv("SLURM_JOB_ID", "4007")
    assert start(3) == (3, 3)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert start(5) == (5, 3)
    monkeypatch.setenv("SLURM_JOB_ID", "4008")
    assert start(6) == (6, 6)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert start(7) == (7, 7) and start(8) == (8, 8)


def test_status_is_not_written_at_every_step(tmp_path):
    peeks = Peeks(tmp_path)
    trainer_of([RunStatus(tmp_path), peeks], train_iters=3).run()
    assert {s["step"] for s in peeks.seen} == {0}


@pytest.mark.parametrize(("fails_at", "error", "code"), [(2, NumericsError, 4)])
def test_a_run_that_fails_says_why(tmp_path, fails_at, error, code):
    trainer = trainer_of([RunStatus(tmp_path), Peeks(tmp_path, fails_at)])
    with pytest.raises(error):
        trainer.run()
    end = status(tmp_path)
    assert (end["state"], end["step"], end["exit_code"]) == ("failed", 2, code)
    assert end["reason"] == "NumericsError: the loss is bad"


def test_a_rank_that_was_given_up_does_not_replace_the_reason(tmp_path, monkeypatch):
    """Rank 0 is stopped; another rank ends the job and says why; rank 0 wakes, steps on, and loses its connection."""
    monkeypatch.setattr(run_status, "HEARTBEAT_SECONDS", 0.0)

    class GivenUp(Log):
        def after_step(self, trainer, out):
            file = StatusFile(tmp_path)
            if trainer.step == 2:
                file.update(file.read(), state="failed", exit_code=5, reason="rank 0 of 2 does not answer")
            if trainer.step == 4:
                raise LostRankError("another rank is gone")

    with pytest.raises(LostRankError):
        trainer_of([RunStatus(tmp_path), GivenUp()]).run()
    end = status(tmp_path)
    assert (end["state"], end["exit_code"], end["reason"]) == ("failed", 5, "rank 0 of 2 does not answer")


def test_what_another_start_wrote_about_its_own_failure_does_not_freeze_the_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(run_status, "HEARTBEAT_SECONDS", 0.0)

    class Refused(Log):
        def after_step(self, trainer, out):
            if trainer.step == 2:
                StatusFile(tmp_path).write("failed", 0, None, "refused", 2)  # from this process, so with its pid
            if trainer.step == 4:
                assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("running", 4)

    trainer_of([RunStatus(tmp_path), Refused()]).run()
    assert status(tmp_path)["state"] == "ended"


def test_resolved_yml_loads_as_the_same_configuration(tmp_path):
    trainer = trainer_of([RunStatus(tmp_path)], train_iters=1, git_hash="abc")
    text = (tmp_path / "resolved.yml").read_text()
    assert [f"# {line}" for line in differences_for(trainer.args)] == text.split("\naccount:")[0].splitlines()[1:]
    values = yaml.safe_load(text)
    assert values["git_hash"] == "abc" and NeoXArgs.from_saved(values).to_dict() == trainer.args.to_dict()


@pytest.mark.parametrize(
    ("keys", "expected"), [({}, None), ({"log_dir": "l"}, "l"), ({"log_dir": "l", "save": "s"}, "s")]
)
def test_which_folder(keys, expected):
    folder = run_folder(args_of(**keys))
    assert (str(folder) if folder else None) == expected


def test_reports_come_last(tmp_path):
    """The last evaluation and the last checkpoint happen in `end`, and must still be shown and tracked."""
    keys = {"save": str(tmp_path), "eval_iters": 1, "log_interval": 5, "log_param_norm": True}
    roles = {"valid": batches, "test": batches}
    callbacks = build_callbacks(RunContext(args_of(**keys), ParallelState.single("cpu"), 37, tmp_path, roles))
    names = [type(callback).__name__ for callback in callbacks]
    assert names[:3] == ["SkippedSteps", "TensorNorms", "Meter"]
    assert names[-5:] == ["Checkpointer", "Console", "MetricsFile", "RunStatus", "StopOnSignal"]
    assert names.index("Meter") < names.index("Evaluator") < names.index("Checkpointer")
    trainer_of(callbacks, **keys).run()
    written = [set(json.loads(line)) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum("train/lm_loss" in k for k in written) == 2
    assert "validation/lm_loss" in written[-2] and "test/lm_loss" in written[-1]
    assert status(tmp_path)["state"] == "ended" and (tmp_path / "latest").read_text().strip() == "global_step10"
