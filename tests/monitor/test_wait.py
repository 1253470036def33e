"""--wait-iterations: its exit codes, and that an older job's numbers are not taken for the job's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import LostRankError, UserError
from megatron.monitor.cli import main
from megatron.monitor.folder import read_folder
from megatron.monitor.rows import Context, Row, make_rows
from megatron.monitor.slurm_jobs import Job
from megatron.monitor.wait import Waiting, await_iterations
from tests.monitor.runs import change

pytestmark = pytest.mark.cpu
JOB = Job("4007", "4007", "neox-training", "me", "main", "RUNNING", start=1.0)
Folders = Callable[..., Path]


def row_of(folder: Path | None, job: Job | None) -> Row:
    runs = [] if folder is None else [read_folder(folder)]
    (row,) = make_rows(runs, [job] if job else [], Context(time.time(), "here", lambda pid: True, True))
    return row


def check(waiting: Waiting, row: Row, now: float = 0.0) -> int | None:
    answer = waiting.check([row], "4007", now)
    return None if answer is None else answer[0]


def test_only_what_this_job_has_trained_counts(place: Folders) -> None:
    """The folder holds a step 7 of an earlier job: the job that runs has trained nothing."""
    folder = place("running", age=3000, job_id="3999")
    (folder / "chain.json").write_text(json.dumps({"links": [{"job_id": "3999"}, {"job_id": "4007"}]}))
    waiting = Waiting(2)
    assert check(waiting, row_of(folder, JOB)) is None
    change(folder, job_id="4007", start_step=6)  # it has resumed there
    assert check(waiting, row_of(folder, JOB)) is None
    change(folder, job_id="4007", start_step=6, step=8)
    assert check(waiting, row_of(folder, JOB)) == 0


def test_a_restart_counts_from_where_the_job_began_first(place: Folders) -> None:
    folder = place("running", age=2)
    waiting = Waiting(9)
    assert check(waiting, row_of(folder, JOB)) is None  # 7
    assert check(waiting, row_of(folder, replace(JOB, state="PENDING", reason="BeginTime", restarts=1))) is None
    late = Waiting(9)
    change(folder, start_step=6, step=7, restart=1)
    assert check(waiting, row_of(folder, replace(JOB, restarts=1))) is None
    change(folder, start_step=6, step=9, restart=1)
    assert check(waiting, row_of(folder, replace(JOB, restarts=1))) == 0
    # One who comes later knows it from the file.
    assert check(late, row_of(folder, replace(JOB, restarts=1))) is None
    change(folder, start_step=6, first_step=0, step=9, restart=1)
    assert check(late, row_of(folder, replace(JOB, restarts=1))) == 0


def test_a_failure_counts_once_no_other_start_follows(place: Folders) -> None:
    folder = place("running", age=0)
    failed = {"state": "failed", "exit_code": LostRankError.exit_code, "reason": "LostRankError: rank 1 is lost"}
    change(folder, **failed)
    waiting = Waiting(50, settle=30)
    assert check(waiting, row_of(folder, JOB), now=100) is None  # its job may start it again
    assert check(waiting, row_of(folder, JOB), now=120) is None
    change(folder, state="running", exit_code=None, reason=None, restart=1)
    assert check(waiting, row_of(folder, replace(JOB, restarts=1)), now=125) is None  # as it did
    change(folder, restart=1, **failed)
    job = replace(JOB, state="FAILED", exit_code="5:0", restarts=1)
    assert check(waiting, row_of(folder, job), now=140) is None
    assert check(waiting, row_of(folder, job), now=144) is None
    assert check(waiting, row_of(folder, job), now=146) == 1


@pytest.mark.parametrize(
    ("job", "fields", "code"),
    [
        ({"state": "PENDING", "reason": "DependencyNeverSatisfied"}, {}, 4),
        ({"state": "PENDING", "reason": "BadConstraints"}, {}, 4),
        ({"state": "PENDING", "reason": "Priority"}, {}, None),
        ({"state": "CANCELLED"}, {}, 3),
        ({"state": "COMPLETED"}, {"state": "ended", "exit_code": 0, "step": 10}, 3),  # all its iterations: 10
        ({"state": "FAILED"}, {"state": "ended", "exit_code": 3}, 3),
        ({"state": "FAILED"}, {"state": "failed", "exit_code": 4, "reason": "NumericsError: NaN"}, 1),
        ({"state": "OUT_OF_MEMORY"}, {}, 1),
        ({"state": "TIMEOUT"}, {}, 1),
        ({}, {"age": 900}, 1),
        ({}, {"activity": "evaluation", "age": 900}, None),
        ({}, {}, None),
    ],
)
def test_exit_codes(place: Folders, job: dict, fields: dict, code: int | None) -> None:
    row = row_of(place("running", **{"age": 2, **fields}), replace(JOB, **job))
    waiting = Waiting(50, settle=0)
    check(waiting, row, now=1)
    assert check(waiting, row, now=2) == code


def test_trained_far_enough_is_enough_whatever_came_after(place: Folders) -> None:
    row = row_of(place("running", age=2), replace(JOB, state="TIMEOUT"))
    assert check(Waiting(7), row) == 0 and check(Waiting(8, settle=0), row, 1) == 1


def test_iterations_of_nan_are_not_trained(place: Folders) -> None:
    row = row_of(place("nan", age=2), JOB)
    assert row.iteration == 5 and check(Waiting(5), row) == 1


def views(*rows: list[Row]) -> Callable[[], tuple[list[Row], list[str]]]:
    left: Iterator[list[Row]] = iter(rows)
    return lambda: (next(left), [])


def test_waiting(place: Folders) -> None:
    folder = place("running", age=2)
    first = row_of(None, replace(JOB, state="PENDING", reason="Priority"))
    second = row_of(folder, JOB)
    change(folder, step=9)
    told: list[str] = []
    options = {"timeout": None, "interval": 0.0, "tell": told.append}
    looks = views([first], [], [second], [row_of(folder, JOB)])
    # a look that finds nothing, as SLURM gives while it is restarted, is no answer
    code, reason = await_iterations(looks, "4007", Waiting(9), **{**options, "interval": 0.001})
    assert code == 0 and "9 iterations" in reason
    lines = ["trained 9 iterations", "4007: pending (Priority)", "4007: training, iteration 7"]
    assert len(told) == 3 and all(line in one for line, one in zip(lines, told))
    code, reason = await_iterations(lambda: ([second], []), "4007", Waiting(9), **{**options, "timeout": 0.0})
    assert code == 124 and "iteration 7" in reason
    with pytest.raises(UserError, match="4007: no such job"):
        await_iterations(lambda: ([], []), "4007", Waiting(9), **options)
    away = iter([([], ["no answer"])] * 3 + [([row_of(folder, JOB)], [])])
    assert await_iterations(lambda: next(away), "4007", Waiting(9), **options)[0] == 0


def test_slurm_that_does_not_answer_is_told_once_and_waited_for_with_a_limit(place: Folders) -> None:
    told: list[str] = []
    options = {"timeout": None, "interval": 0.001, "tell": told.append}
    code, reason = await_iterations(lambda: ([], ["no source"]), "4007", Waiting(9), reach=0.02, **options)
    assert code == 6 and "no source" in reason
    assert len(told) == 2 and told[1].endswith("no source")
    # A job that was seen once is waited for, and what fails later is told again.
    told.clear()
    row = row_of(place("running", age=2), JOB)
    looks = iter([([row], []), *[([], ["away"])] * 40, ([row], []), ([], ["away"]), ([row], [])])
    with pytest.raises(StopIteration):
        await_iterations(lambda: next(looks), "4007", Waiting(9), reach=0.02, **options)
    assert [line.rpartition(" ")[2] for line in told[1:]] == ["7", "away", "away"]


def test_the_command(place: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place("running", age=2, job_id=None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["--wait-iterations", "7", str(folder)], {}) == 0
    assert "7 iterations" in capsys.readouterr().out
    assert main(["--wait-iterations", "8", str(folder), "--timeout", "0.1", "--watch", "0.1", "--json"], {}) == 124
    found = json.loads(capsys.readouterr().out)
    assert found["code"] == 124 and found["runs"][0]["iteration"] == 7
    with pytest.raises(UserError, match="77"):
        main(["--wait-iterations", "8", "77", "--watch", "0.1"], {})
