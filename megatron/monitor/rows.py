"""Runs and jobs brought together: one row for each, in the table and in `--json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.run_metrics import LOSS
from megatron.files import number, whole
from megatron.monitor.folder import RunFolder, Score, read_folder
from megatron.monitor.joblog import JobLog, read_log
from megatron.monitor.judge import Evidence, Problem, judge
from megatron.monitor.slurm_jobs import Job

LIVE = ("pending", "running", "starting", "training", "evaluation", "checkpoint")
RECENT_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Row:
    """One run, or one job of which no run is known. slurm/README.md documents every field.

    None where a value is not known; times in seconds since 1970, lengths of time in seconds.
    """

    job_id: str | None
    job_ids: tuple[str, ...]
    job_name: str | None
    job_state: str | None
    job_reason: str | None
    user: str | None
    partition: str | None
    nodes: int | None
    gpus: int | None
    restarts: int
    experiment: str | None
    run_folder: str | None
    log: str | None
    state: str
    iteration: int | None
    train_iters: int | None
    start_iteration: int | None
    loss: float | None
    tokens_per_second: float | None
    mfu: float | None
    eta_seconds: float | None
    heartbeat: float | None
    heartbeat_age: float | None
    activity: str | None
    evaluating: tuple[int, ...]
    scores: Mapping[str, Score]
    problems: tuple[Problem, ...]
    action: str | None
    action_reason: str

    def to_json(self) -> dict[str, Any]:
        """As it stands in `--json`."""
        return asdict(self)


@dataclass(frozen=True)
class Context:
    """What all rows are judged by. `logs`: the folder of the site's logs; the rest as in `Evidence`."""

    now: float
    host: str
    is_alive: Any
    answered: bool = False
    logs: str | None = None


def make_rows(folders: Iterable[RunFolder], jobs: Sequence[Job], context: Context) -> list[Row]:
    """A row for each run with its newest job, and for each job without one: live ones first, then by job."""
    by_id = {job.raw_id: job for job in jobs}
    runs = {run.path.resolve(): run for run in folders}
    of_job = {job: run for run in runs.values() for job in run.job_ids}
    logs: dict[str, JobLog] = {}
    for job in jobs:
        if job.state == "PENDING" or (job.raw_id in of_job and job.state not in ("RUNNING", "FAILED")):
            continue
        found = [log for path in job.logs(context.logs) if (log := read_log(path)) is not None]
        if found:
            logs[job.raw_id] = found[0]
        if job.raw_id not in of_job and found and found[0].save:
            place = Path(job.work_dir, found[0].save).resolve()
            if place not in runs and (place / "status.json").exists():
                runs[place] = read_folder(place)
            if place in runs:
                of_job[job.raw_id] = runs[place]
    newest: dict[Path, Job | None] = {run.path: None for run in runs.values()}
    for raw_id, run in of_job.items():
        if raw_id in by_id:
            newest[run.path] = _newer(newest[run.path], by_id[raw_id])
    rows = [_row(run, newest[run.path], logs, context) for run in runs.values()]
    rows += [_row(None, job, logs, context) for job in jobs if job.raw_id not in of_job]
    return sorted(
        rows, key=lambda row: (row.state not in LIVE, row.job_id is None, _number_of(row), row.experiment or "")
    )


def is_shown(row: Row, now: float) -> bool:
    """Whether a row is in the table without `--all`: what lives, and what ended badly within a day."""
    if row.state in LIVE:
        return True
    recent = row.heartbeat is None or now - row.heartbeat < RECENT_SECONDS
    return recent and row.action in ("retry", "fix", "escalate")


def _newer(one: Job | None, other: Job) -> Job:
    """The job that tells how the run stands: one that runs, else waits, else the last one."""
    if one is None:
        return other
    rank = {"RUNNING": 2, "COMPLETING": 2, "PENDING": 1}
    keys = [
        (rank.get(job.state, 0), job.start or 0.0, int(job.raw_id) if job.raw_id.isdigit() else 0)
        for job in (one, other)
    ]
    return other if keys[1] > keys[0] else one


def _number_of(row: Row) -> int:
    first = (row.job_id or "").partition("_")[0]
    return int(first) if first.isdigit() else 0


def _row(run: RunFolder | None, job: Job | None, logs: Mapping[str, JobLog], context: Context) -> Row:
    log = logs.get(job.raw_id) if job is not None else None
    evidence = Evidence(run, job, log, context.now, context.host, context.is_alive, context.answered)
    verdict = judge(evidence)
    status: Mapping[str, Any] = run.status if run is not None else {}
    last: Mapping[str, Any] = run.lines[-1] if run is not None and run.lines else {}
    steps = [step for step in (whole(status.get("step")), whole(last.get("step"))) if step is not None]
    iteration, total = max(steps, default=None), whole(status.get("train_iters"))
    start = _first_step(status) if evidence.own_status else None
    if run is None and log is not None:  # a run that stores nothing
        iteration, total, start = log.iteration, log.total, None if log.iteration is None else log.start
    activity = status.get("activity") if verdict.state in LIVE and evidence.own_status else None
    if log is not None and log.evaluates and verdict.state == "evaluation":
        activity = "evaluation"
    return Row(
        job_id=job.job_id if job is not None else (str(status["job_id"]) if status.get("job_id") else None),
        job_ids=_job_ids(run, job),
        job_name=job.name if job is not None else None,
        job_state=job.state if job is not None else None,
        job_reason=(job.reason or None) if job is not None else None,
        user=job.user if job is not None else None,
        partition=job.partition if job is not None else None,
        nodes=job.nodes if job is not None else None,
        gpus=job.gpus if job is not None else None,
        restarts=_restarts(run, job),
        experiment=run.experiment
        if run is not None
        else (Path(log.save).name if log is not None and log.save else None),
        run_folder=str(run.path) if run is not None else None,
        log=str(log.path) if log is not None else (job.output if job is not None else None),
        state=verdict.state,
        iteration=iteration,
        train_iters=total,
        start_iteration=start,
        loss=_loss(run) if run is not None else (log.loss if log is not None else None),
        tokens_per_second=number(last.get("runtime/tokens_per_sec")),
        mfu=number(last.get("runtime/model_flops_utilization")),
        eta_seconds=_eta(run, iteration, total) if run is not None and verdict.state in LIVE[1:] else None,
        heartbeat=number(status.get("heartbeat")),
        heartbeat_age=evidence.heartbeat_age,
        activity=activity if isinstance(activity, str) else None,
        evaluating=_evaluating(run, activity, iteration),
        scores=run.scores if run is not None else {},
        problems=verdict.problems,
        action=verdict.action,
        action_reason=verdict.reason,
    )


def _first_step(status: Mapping[str, Any]) -> int | None:
    """Where the job began, once its present start has loaded what it trains."""
    first, start = whole(status.get("first_step")), whole(status.get("start_step"))
    return start if first is None or start is None else first


def _job_ids(run: RunFolder | None, job: Job | None) -> tuple[str, ...]:
    """SLURM_JOB_ID of all jobs of the run, as far as they are known, and the present one as users write it."""
    known = run.job_ids if run is not None else []
    return tuple(dict.fromkeys([*known, job.raw_id, job.job_id] if job is not None else known))


def _evaluating(run: RunFolder | None, activity: object, iteration: int | None) -> tuple[int, ...]:
    """The iterations that are being evaluated: by the run itself, and by jobs whose results are not recorded yet."""
    steps = {step for step, one in run.evaluations.items() if one == "submitted"} if run is not None else set()
    return tuple(sorted(steps | ({iteration} if activity == "evaluation" and iteration is not None else set())))


def _restarts(run: RunFolder | None, job: Job | None) -> int:
    """How often the run was started again: its chain knows all its jobs, SLURM only the present one."""
    chained = len(run.links) - 1 if run is not None and run.links else 0
    return max(chained, job.restarts if job is not None else 0)


def _loss(run: RunFolder) -> float | None:
    """That of the newest log which has one: logs of steps that forget alone do not."""
    return next((number(line[LOSS]) for line in reversed(run.lines) if LOSS in line), None)


def _eta(run: RunFolder, iteration: int | None, total: int | None) -> float | None:
    """Seconds to the end: by the time between the last logs, evaluations and checkpoints among it included."""
    if iteration is None or total is None or not run.lines:
        return None
    first, last = run.lines[0], run.lines[-1]
    times = [number(line.get("time")) for line in (first, last)]
    steps = [whole(line.get("step")) for line in (first, last)]
    each = number(last.get("runtime/iteration_time"))
    if None not in (*times, *steps) and steps[1] > steps[0] and times[1] > times[0]:  # type: ignore[operator]
        each = (times[1] - times[0]) / (steps[1] - steps[0])  # type: ignore[operator]
    return None if each is None else max(0, total - iteration) * each
