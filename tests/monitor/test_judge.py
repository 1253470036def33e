"""Every problem that the monitor knows, and what it says to do about it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.cluster.evaluation_jobs import Evaluation, Evaluations
from megatron.cluster.status import StatusFile
from megatron.errors import LostRankError, MachineError, NumericsError, UserError
from megatron.monitor.folder import Score, read_folder
from megatron.monitor.rows import Context, Row, make_rows
from megatron.monitor.slurm_jobs import Job
from tests.monitor.runs import change

pytestmark = pytest.mark.cpu
Place = Callable[..., Path]
NOW = time.time() - 300  # as in a session of tests that has been running for a while
RUNNING = Job("4007", "4007", "neox-training", "me", "main", "RUNNING", start=NOW - 5000)


def row_of(folder: Path | None, *jobs: Job, answered: bool = True, alive: bool = True, host: str = "here") -> Row:
    runs = [] if folder is None else [read_folder(folder)]
    rows = make_rows(runs, jobs, Context(time.time(), host, lambda pid: alive, answered))
    assert len(rows) == 1
    return rows[0]


def kinds(row: Row) -> list[str]:
    return [one.kind for one in row.problems]


def logged(folder: Path, job: Job = RUNNING, more: str = "", age: float = 0.0) -> Job:
    """The job with the log of the run in `folder`, `more` at its end, last written `age` seconds ago."""
    log = folder.with_suffix(".out")
    with log.open("a") as file:
        file.write(more)
    os.utime(log, (time.time(), time.time() - age))
    return replace(job, output=str(log))


def test_a_healthy_run(place: Place) -> None:
    row = row_of(place("running", age=4), logged(place("running", "again")))
    assert (row.state, row.action, row.problems) == ("training", "wait", ())
    assert (row.job_id, row.iteration, row.train_iters, row.start_iteration) == ("4007", 7, 10, 0)
    last = [json.loads(line) for line in (Path(row.run_folder) / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in last if "train/lm_loss" in line]
    assert row.loss == 2.0 and row.tokens_per_second == train[-1]["runtime/tokens_per_sec"]
    assert row.mfu == train[-1]["runtime/model_flops_utilization"]
    assert row.eta_seconds == pytest.approx(3 * (train[-1]["time"] - train[0]["time"]) / 6)
    assert 3 < row.heartbeat_age < 30 and row.scores["validation/lm_loss"].iteration == 5
    assert row.scores["validation/lm_loss"].value == 3.0


def test_the_score_of_the_newest_checkpoint_is_shown_whichever_came_last(place: Place) -> None:
    folder = place("running")
    with (folder / "metrics.jsonl").open("a") as file:
        for step, score in ((6, 0.5), (4, 0.25), (6, 0.75), (2, 0.1)):  # jobs end as they please
            file.write(json.dumps({"step": step, "time": NOW, "eval_tasks/mine_acc": score}) + "\n")
    score = row_of(folder).scores["eval_tasks/mine_acc"]
    assert (score.iteration, score.value) == (6, 0.75)


def test_a_log_of_steps_that_forget_alone_is_no_evaluation(place: Place) -> None:
    """As with log_interval: 1: it has no loss of ordinary steps. Those that a threshold leaves out are no fault."""
    folder = place("running", age=4)
    scores = row_of(folder, RUNNING).scores
    numbers = {"train/learning_rate": 0.5, "train/ga_actual_loss": 1.5, "train/skipped": 1, "train/nan": 0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 8, "time": time.time(), **numbers, "runtime/tokens_per_sec": 77.0}) + "\n")
    row = row_of(folder, RUNNING)
    assert row.scores == scores and (row.iteration, row.loss, row.tokens_per_second) == (8, 2.0, 77.0)
    assert row.state == "training" and "nan" not in kinds(row)


def test_a_run_that_is_done(place: Place) -> None:
    row = row_of(place("ended"), replace(RUNNING, state="COMPLETED", exit_code="0:0"))
    assert (row.state, row.action, row.problems) == ("done", None, ())
    assert {name: score.iteration for name, score in row.scores.items()}["test/lm_loss"] == 10


@pytest.mark.parametrize(
    ("error", "kind", "action"),
    [
        (ValueError("boom"), "crashed", "fix"),
        (UserError("run.yml:3: wrong"), "bad_config", "fix"),
        (NumericsError("the loss is NaN"), "nan", "escalate"),
        (LostRankError("rank 3 does not answer"), "lost_rank", "retry"),
        (MachineError("the disk is full"), "disk", "fix"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20 GiB"), "out_of_memory", "escalate"),
    ],
)
def test_a_run_that_failed_while_slurm_says_running(place: Place, error: Exception, kind: str, action: str) -> None:
    folder = place("running")
    StatusFile(folder).write_failure(error, 7, 10)
    change(folder, job_id="4007")
    row = row_of(folder, RUNNING)
    assert (row.state, kinds(row), row.action) == ("failed", [kind], action)
    assert str(error) in row.action_reason and row.job_state == "RUNNING"


@pytest.mark.parametrize("state", ["COMPLETING", "RUNNING"])
def test_what_stopped_a_moment_ago_is_not_to_be_submitted_again_before_slurm_says_why(place: Place, state: str) -> None:
    fields = {"state": "failed", "exit_code": 3, "reason": "stopped by SIGTERM"}
    row = row_of(place("running", age=3, **fields), replace(RUNNING, state=state))
    assert (row.state, kinds(row), row.action) == ("stopped", ["stopped"], "wait")
    row = row_of(place("running", "cancelled", age=3, **fields), replace(RUNNING, state="CANCELLED"))
    assert (kinds(row), row.action) == (["cancelled"], None)
    row = row_of(place("running", "preempted", age=3, **fields), replace(RUNNING, state="PREEMPTED"))
    assert (kinds(row), row.action) == (["preempted"], "retry")
    row = row_of(place("running", "hangs", age=120, **fields), RUNNING)
    assert (kinds(row), row.action) == (["stopped"], "retry")


def test_a_job_that_is_completing_without_a_word_of_its_run_waits(place: Place) -> None:
    row = row_of(place("running", age=700), replace(RUNNING, state="COMPLETING"))
    assert (kinds(row), row.action) == (["stale"], "wait")
    log = logged(place("running", "crashed", age=120), more="RuntimeError: NCCL error\n", age=110)
    assert row_of(place("running", "crashed2", age=120), replace(log, state="COMPLETING")).action == "wait"


def test_a_traceback_at_the_end_of_the_log(place: Place) -> None:
    """The ranks hang in their exit: status.json says running, SLURM too."""
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no such thing\n'
    folder = place("running", age=120)
    row = row_of(folder, logged(folder, more=trace, age=110))
    assert (row.state, kinds(row), row.action) == ("failed", ["crashed"], "fix")
    assert "ValueError: no such thing" in row.action_reason
    folder = place("running", "fresh", age=3)  # it trains: something else of the job wrote that
    assert row_of(folder, logged(folder, more=trace)).problems == ()
    folder = place("running", "again", age=120)  # SLURM has started it again since
    text = folder.with_suffix(".out").read_text()
    assert kinds(row_of(folder, logged(folder, more=trace + text, age=110))) == []


def test_a_run_without_a_folder_is_known_by_its_log(place: Place, tmp_path: Path) -> None:
    log = place("running").with_suffix(".out")
    text = log.read_text()
    text = re.sub("save: .*", "save: nothing is stored", text).replace("starts at iteration 0", "starts at iteration 3")
    log.write_text(text)
    job = replace(RUNNING, output=str(log), name="mine")
    row = row_of(None, job)
    assert (row.state, row.iteration, row.train_iters, row.loss, row.start_iteration) == ("training", 7, 10, 2.0, 3)
    assert row.run_folder is None and row.action == "wait"
    log.write_text(re.sub("lm_loss: 2.0*E.00", "lm_loss: NAN", text))
    row = row_of(None, job)
    assert (row.loss, kinds(row), row.action) == (None, ["nan"], "escalate")
    log.write_text(text + text.splitlines()[0])  # started again
    assert (row_of(None, job).iteration, row_of(None, job).start_iteration) == (None, None)
    os.utime(log, (0, time.time() - 700))
    assert kinds(row_of(None, job)) == ["stale"]


def test_out_of_memory_in_the_log(place: Place) -> None:
    folder = place("running", age=120)
    more = "[rank 3] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    row = row_of(folder, logged(folder, more=more, age=100))
    assert (kinds(row), row.action) == (["out_of_memory"], "escalate")


def test_stale(place: Place) -> None:
    row = row_of(place("running", age=700), RUNNING)
    assert (row.state, kinds(row), row.action) == ("training", ["stale"], "retry")
    assert row_of(place("running", "young", age=500), RUNNING).problems == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"activity": "evaluation"},
        {"activity": "checkpoint"},
        {"step": 1},  # the first two steps compile
        {"state": "starting", "start_step": None},
    ],
)
def test_what_is_known_to_last_is_not_stale(place: Place, fields: dict) -> None:
    assert row_of(place("running", age=3000, **fields), RUNNING).problems == ()
    row = row_of(place("running", "too_long", age=4000, **fields), RUNNING)
    assert kinds(row) == ["stale"]
    assert row.state == fields.get("activity", fields.get("state", "training"))


def test_steps_of_nan(place: Place) -> None:
    row = row_of(place("nan", age=2), RUNNING)
    assert (kinds(row), row.action, row.state) == (["nan"], "escalate", "training")
    assert "3 steps" in row.action_reason


def test_a_step_of_nan_that_has_passed(place: Place) -> None:
    folder = place("nan", age=2)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    good = {**lines[1], "step": 6, "time": time.time()}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, good]))
    row = row_of(folder, RUNNING)
    assert (kinds(row), row.action) == (["nan"], "wait")


def test_skipped_steps(place: Place) -> None:
    """As of fp16 whose scale is still too large: some are no problem, all are."""
    folder = place("running", age=2)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["train/skipped"] = 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = row_of(folder, RUNNING)
    assert (kinds(row), row.action) == (["skipped_steps"], "wait")
    lines[-1]["train/skipped"] = 1  # its interval is one step
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = row_of(folder, RUNNING)
    assert (kinds(row), row.action) == (["nan"], "escalate")


@pytest.mark.parametrize(
    ("reason", "kind", "action"),
    [
        ("DependencyNeverSatisfied", "dependency_never_satisfied", "fix"),
        ("BadConstraints", "cannot_start", "fix"),
        ("PartitionTimeLimit", "cannot_start", "fix"),
        ("JobHeldUser", "held", "fix"),
        ("launch failed requeued held", "held", "fix"),
        ("Priority", None, "wait"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", None, "wait"),
    ],
)
def test_jobs_that_wait(reason: str, kind: str | None, action: str) -> None:
    row = row_of(None, replace(RUNNING, state="PENDING", reason=reason, start=None))
    assert (row.state, kinds(row), row.action) == ("pending", [kind] if kind else [], action)
    assert reason in row.action_reason or kind == "dependency_never_satisfied"


@pytest.mark.parametrize(
    ("state", "kind", "action"),
    [
        ("OUT_OF_MEMORY", "out_of_memory", "escalate"),
        ("TIMEOUT", "time_limit", "retry"),
        ("NODE_FAIL", "node_failure", "retry"),
        ("PREEMPTED", "preempted", "retry"),
        ("FAILED", "crashed", "fix"),
        ("CANCELLED", "cancelled", None),
    ],
)
def test_jobs_that_slurm_ended(place: Place, state: str, kind: str, action: str | None) -> None:
    """The run had no time to say so: its status is that of its last heartbeat."""
    row = row_of(place("running", age=50), replace(RUNNING, state=state, exit_code="1:0"))
    assert (kinds(row), row.action) == ([kind], action)
    assert row.state == ("stopped" if kind == "cancelled" else "failed")


@pytest.mark.parametrize(
    ("code", "kind", "action"),
    [("2:0", "bad_config", "fix"), ("5:0", "lost_rank", "retry"), ("3:0", "stopped", "retry")],
)
def test_a_job_that_failed_before_it_had_a_run_folder(tmp_path: Path, code: str, kind: str, action: str) -> None:
    log = tmp_path / "x.out"
    log.write_text("error: run.yml:1: unknown key 'num_layer'\n")
    row = row_of(None, replace(RUNNING, state="FAILED", exit_code=code, output=str(log)))
    assert (kinds(row), row.action) == ([kind], action) and "num_layer" in row.action_reason


def chain(folder: Path, *links: dict, in_a_row: int = 0) -> None:
    text = json.dumps({"version": 1, "links": links, "in_a_row": in_a_row, "excluded": []})
    (folder / "chain.json").write_text(text)


def test_a_run_that_slurm_starts_again_is_waited_for(place: Place) -> None:
    folder = place("running", age=50)
    chain(folder, {"job_id": "4007", "restart": 0, "started": 1.0, "ended": 2.0, "code": 3, "next": "requeue"})
    row = row_of(folder, replace(RUNNING, state="PENDING", reason="BeginTime", restarts=1))
    assert (row.state, row.action, row.iteration) == ("pending", "wait", 7) and "BeginTime" in row.action_reason
    StatusFile(folder).write_failure(LostRankError("rank 1 is lost"), 7, 10)
    change(folder, job_id="4007")
    assert (row_of(folder, RUNNING).action, kinds(row_of(folder, RUNNING))) == ("wait", ["lost_rank"])
    chain(folder, {"job_id": "4007", "started": 1.0, "next": "4011"})
    row = row_of(folder, replace(RUNNING, state="TIMEOUT"))
    assert row.action == "wait" and "4011" in row.action_reason
    follower = replace(RUNNING, job_id="4011", raw_id="4011", state="PENDING", reason="Priority")
    row = row_of(folder, replace(RUNNING, state="TIMEOUT"), follower)
    assert (row.job_id, row.job_ids, row.state, row.action) == ("4011", ("4007", "4011"), "pending", "wait")
    chain(folder, {"job_id": "4007", "started": 1.0, "next": "4011"}, {"job_id": "4011", "started": 2.0, "next": None})
    assert row_of(folder, replace(RUNNING, state="TIMEOUT"), follower).restarts == 1


def test_repeated_failures_are_for_a_person(place: Place) -> None:
    folder = place("running", age=50)
    chain(folder, {"job_id": "4007", "started": 1.0, "next": None}, in_a_row=3)
    row = row_of(folder, replace(RUNNING, state="NODE_FAIL"))
    assert (kinds(row), row.action) == (["repeated_failures", "node_failure"], "escalate")


@pytest.mark.parametrize("fields", [{"job_id": "3999"}, {"restart": 0}])
def test_a_status_of_an_older_job(place: Place, fields: dict) -> None:
    """Its end, its heartbeat and its step say nothing about the job that runs."""
    folder = place("running", age=4000, **fields)
    StatusFile(folder).write_failure(LostRankError("rank 1 is lost"), 7, 10)
    change(folder, age=4000, **{"job_id": "4007", **fields})
    chain(folder, {"job_id": "4007", "started": 1.0, "next": None})
    row = row_of(folder, replace(RUNNING, restarts=1, start=time.time() - 90))
    assert (row.state, kinds(row), row.action) == ("starting", ["older_status"], "wait")
    assert row.start_iteration is None and fields.get("job_id", "an earlier start") in row.action_reason


def test_clocks_that_differ(place: Place) -> None:
    row = row_of(place("running", age=-300), RUNNING)  # ahead of ours
    assert (kinds(row), row.action) == (["clock"], "wait") and "elsewhere is 5 min ahead" in row.action_reason
    behind = place("running", "behind", age=3600, written=2)  # an hour behind the file system's
    row = row_of(behind, RUNNING)
    assert kinds(row) == ["clock"] and row.heartbeat_age < 60  # and not stale
    assert kinds(row_of(place("running", "both", age=4000, written=900), RUNNING)) == ["stale", "clock"]


def test_runs_without_slurm(place: Place) -> None:
    folder = place("running", age=60, host="here", job_id=None)
    assert row_of(folder).problems == () and row_of(folder).job_id is None
    row = row_of(folder, alive=False)
    assert (row.state, kinds(row), row.action) == ("failed", ["crashed"], "fix")
    assert row_of(folder, alive=False, host="other").problems == ()  # its processes are not ours to see
    assert kinds(row_of(place("running", "old", age=5000))) == ["lost"]  # SLURM has forgotten job 4007
    assert kinds(row_of(place("running", "unknown", age=5000), answered=False)) == ["stale"]


def test_a_run_that_was_stopped_on_request(place: Place) -> None:
    row = row_of(place("ended", state="ended", exit_code=3, step=6, reason="StopRequested: SIGTERM"))
    assert (row.state, kinds(row), row.action) == ("stopped", ["stopped"], "retry")
    row = row_of(Path(row.run_folder), replace(RUNNING, state="CANCELLED"))  # by a person, who knows
    assert (row.state, kinds(row), row.action) == ("stopped", ["cancelled"], None)


@pytest.mark.parametrize(
    ("name", "content", "damaged"),
    [
        ("status.json", '{"version": 1, "sta', True),
        ("status.json", "[1, 2]", True),
        ("status.json", '{"state": 7, "step": "x", "heartbeat": "soon", "job_id": {}, "restart": null}', False),
        ("metrics.jsonl", "\0" * 3000 + "\n", True),
        ("metrics.jsonl", '{"step": "x", "time": null, "train/lm_loss": "y", "train/nan": "z"}\n[]\n7\n', True),
        ("chain.json", '{"links": {"job_id": 3}, "in_a_row": "many"}', False),
        ("eval_results/jobs.json", '{"jobs": {"x": 3, "4": [], "5": {"state": []}}}', False),
        ("eval_results/jobs.json", "{", True),
        ("chain.json", '{"links": [7, {"job_id": null}]', True),
    ],
)
def test_damaged_files_are_a_row_with_a_problem(place: Place, name: str, content: str, damaged: bool) -> None:
    folder = place("running", age=2)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    row = row_of(folder)
    assert any(one.kind == "damaged_file" and Path(name).name in one.text for one in row.problems) == damaged
    json.dumps(row.to_json(), allow_nan=False)


def test_evaluations_by_the_run_and_by_jobs_of_their_own(place: Place) -> None:
    folder = place("running", age=2, activity="evaluation")
    (folder / "eval_results").mkdir()
    with Evaluations(folder).change() as jobs:
        jobs |= {2: Evaluation("recorded"), 4: Evaluation("submitted", "4008"), 3: Evaluation("failed", "4006")}
    with (folder / "metrics.jsonl").open("a") as file:  # that of the fifth came first
        file.writelines(json.dumps({"step": step, "eval_tasks/acc": step / 10}) + "\n" for step in (5, 2))
    row = row_of(folder, RUNNING)
    assert (row.state, row.evaluating) == ("evaluation", (4, 7))
    assert row.scores["eval_tasks/acc"] == Score(0.5, 5)
    assert (kinds(row), row.action) == (["evaluation_failed"], "wait") and "iterations 3" in row.action_reason


def test_a_line_that_is_being_written_is_not_damage(place: Place) -> None:
    folder = place("running", age=2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "time": 17, "train/lm')
    row = row_of(folder, RUNNING)
    assert (row.problems, row.iteration, row.loss) == ((), 7, 2.0)
