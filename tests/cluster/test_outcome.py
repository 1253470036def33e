"""The exit code of a job that another launcher ran."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from megatron.cluster.local import JobEnd
from megatron.cluster.outcome import await_end, outcome, record_end
from megatron.cluster.status import StatusFile

pytestmark = pytest.mark.cpu


def write(folder: Path, **status: object) -> float:
    """Write status.json; returns a time before it."""
    since = time.time() - 1
    (folder / "status.json").write_text(json.dumps(status))
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
    since = write(tmp_path, state="failed", step=3, reason="connection closed by peer", exit_code=1)
    end = JobEnd(5, "rank 2 of 4 failed: killed by SIGKILL")
    record_end(tmp_path, since, end)
    status = StatusFile(tmp_path).read(since)
    assert status is not None and (status["exit_code"], status["step"]) == (5, 3)
    assert status["reason"] == end.reason
    since = write(tmp_path, state="failed", step=3, reason="NumericsError: nan", exit_code=4)
    record_end(tmp_path, since, JobEnd(4, "rank 0 of 4 failed: exit code 4"))
    record_end(tmp_path, since, JobEnd(0))
    status = StatusFile(tmp_path).read(since)
    assert status is not None and status["reason"] == "NumericsError: nan"  # the run said it better itself
    record_end(tmp_path / "absent", since, JobEnd(5, "x"))
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]
