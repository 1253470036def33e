"""The exit code of a job that another launcher ran."""

from __future__ import annotations

import errno
import json
import threading
import time
from pathlib import Path

import pytest

from megatron.checkpoint.lock import SaveLock
from megatron.cluster.local import JobEnd
from megatron.cluster.outcome import await_end, outcome, record_end
from megatron.cluster.status import StatusFile

pytestmark = pytest.mark.cpu


def write(folder: Path, **status: object) -> float:
    """Write status.json; returns a time before it."""
    since = time.time() - 1
    (folder / "status.json").write_text(json.dumps({"started": since, **status}))
    return since


def test_the_run_s_own_account_wins_over_a_flattened_code(tmp_path: Path) -> None:
    since = write(tmp_path, state="failed", step=7, reason="NumericsError: nan", exit_code=4)
    assert outcome(1, tmp_path, since) == 4
    assert outcome(0, tmp_path, since) == 0  # a launcher that says all is well is believed


def test_without_an_account_of_this_job_the_launcher_s_code_stands(tmp_path: Path) -> None:
    assert outcome(5, tmp_path, 0) == 5
    assert outcome(143, None, 0) == 143
    write(tmp_path, state="failed", exit_code=4)
    assert outcome(1, tmp_path, time.time() + 60) == 1  # left behind by an earlier job
    since = write(tmp_path, state="running", step=3, exit_code=None)
    assert outcome(1, tmp_path, since) == 1  # it never came to say why
    (tmp_path / "status.json").write_text("{half")
    assert StatusFile(tmp_path).read() is None


def test_when_rank_0_was_killed_the_launcher_s_account_is_kept(tmp_path: Path) -> None:
    since = write(tmp_path, state="running", step=3, reason=None, exit_code=None)
    end = JobEnd(5, "srun failed: exit code 137")
    assert outcome(5, tmp_path, since) == 5 and status(tmp_path)[0] == "running"  # its ranks may still run
    assert outcome(5, tmp_path, since, end) == 5 and status(tmp_path) == ("failed", 3, 5, end.reason)
    since = write(tmp_path, state="failed", step=7, reason="NumericsError: nan", exit_code=4)
    assert outcome(5, tmp_path, since, end) == 4 and status(tmp_path) == ("failed", 7, 4, "NumericsError: nan")


def test_a_stopped_run_is_waited_for_until_it_says_how_it_ended(tmp_path: Path) -> None:
    since = write(tmp_path, state="saving", step=3)
    end = threading.Timer(1.0, lambda: write(tmp_path, state="ended", step=3, reason="stopped", exit_code=3))
    end.start()
    assert await_end(143, tmp_path, since, patience=20) == 3
    end.join()
    since = write(tmp_path, state="saving", step=3)
    assert await_end(143, tmp_path, since, patience=0.1) == 143
    assert await_end(143, tmp_path / "absent", since, patience=20) == 143


def test_what_only_the_launcher_knows_goes_into_the_status(tmp_path: Path) -> None:
    since = write(tmp_path, state="failed", step=3, reason="another rank is gone or does not answer", exit_code=5)
    end = JobEnd(5, "rank 2 of 4 failed: killed by SIGKILL", known_best=True)
    record_end(tmp_path, since, end)
    assert status(tmp_path) == ("failed", 3, 5, end.reason)
    own = {"state": "failed", "step": 3, "reason": "no step for 60 s: rank 1 is silent", "exit_code": 5}
    record_end(tmp_path, write(tmp_path, **own), JobEnd(5, "rank 0 of 4 failed: exit code 5"))
    assert status(tmp_path)[3] == own["reason"]  # the run said it better itself
    record_end(tmp_path, write(tmp_path, **own), JobEnd(4, "rank 1 of 4 failed: exit code 4"))
    assert status(tmp_path) == ("failed", 3, 4, "rank 1 of 4 failed: exit code 4")
    record_end(tmp_path / "absent", since, JobEnd(5, "x"))
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    ("before", "end", "after"),
    [
        ({"state": "running", "exit_code": None}, JobEnd(130, "a second Ctrl-C"), ("failed", 130)),
        ({"state": "starting", "exit_code": None}, JobEnd(3, "stopped by SIGTERM"), ("ended", 3)),
        ({"state": "ended", "exit_code": 3}, JobEnd(3, "stopped by SIGTERM"), ("ended", 3)),
        ({"state": "ended", "exit_code": 0}, JobEnd(0), ("ended", 0)),
    ],
)
def test_a_run_that_could_not_say_how_it_ended(tmp_path: Path, before: dict, end: JobEnd, after: tuple) -> None:
    record_end(tmp_path, write(tmp_path, step=7, reason=None, **before), end)
    assert status(tmp_path)[:3] == (after[0], 7, after[1])


def test_a_start_that_failed_before_it_could_write_replaces_what_the_start_before_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    write(tmp_path, state="ended", step=40, reason="stopped by Ctrl-C", exit_code=3)
    end = JobEnd(5, "rank 1 of 2 failed: killed by SIGKILL", known_best=True)
    with SaveLock(tmp_path):  # by a live process: the job was refused, and the status is that one's
        record_end(tmp_path, time.time() + 60, end)
        assert status(tmp_path) == ("ended", 40, 3, "stopped by Ctrl-C")
    record_end(tmp_path, time.time() + 60, end)
    assert status(tmp_path) == ("failed", 40, 5, end.reason)
    assert json.loads((tmp_path / "status.json").read_text())["job_id"] == "8"


@pytest.mark.parametrize("slurm", [True, False])
def test_a_start_that_was_refused_leaves_the_status_to_the_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: bool
) -> None:
    """Its heartbeat is fresh, but it is that of another job, or of an earlier restart of this one."""
    end = JobEnd(2, "srun failed: exit code 2")
    others = [{"job_id": "7", "restart": 1}, {"job_id": "8", "restart": 0}] if slurm else [{"job_id": None}]
    if slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "8")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with SaveLock(tmp_path):
        for other in others:
            # Outside of SLURM a start of the same moment, too.
            for started in (time.time() - 60, time.time()):
                running = {"state": "running", "step": 9, "reason": None, "started": started, **other}
                since = write(tmp_path, exit_code=None, **running)
                assert outcome(2, tmp_path, since, end) == 2
                record_end(tmp_path, since, end)
                assert status(tmp_path) == ("running", 9, None, None)
                since = write(tmp_path, exit_code=4, **running)
                assert outcome(2, tmp_path, since, end) == 2  # not the other's code
        since = write(tmp_path, **{**running, "state": "ended", "started": 0.0}, exit_code=3)
        assert await_end(143, tmp_path, since, patience=0.1) == 143
        if slurm:  # rank 0's node is gone, and its lock still there
            since = write(tmp_path, state="running", step=9, reason=None, exit_code=None, job_id="8", restart=1)
            assert outcome(5, tmp_path, since, JobEnd(5, "killed")) == 5
            assert status(tmp_path) == ("failed", 9, 5, "killed")


def test_the_status_is_written_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, state="running", step=3, reason="x" * 900, exit_code=None)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("megatron.cluster.status.write_atomically", full)
    StatusFile(tmp_path).write("failed", 4, 10, "NoRoomError", 6)
    assert status(tmp_path) == ("failed", 4, 6, "NoRoomError")


def status(folder: Path) -> tuple:
    found = json.loads((folder / "status.json").read_text())
    return found["state"], found["step"], found["exit_code"], found["reason"]
