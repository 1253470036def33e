"""What is wrong with a run or a job, and what to do about it.

Facts of the run's own files count first, then SLURM's, the log's last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.checkpoint.run_metrics import LOSS
from megatron.errors import LostRankError, MachineError, NumericsError, StopRequested, UserError
from megatron.files import number, whole
from megatron.monitor.folder import RunFolder
from megatron.monitor.joblog import OUT_OF_MEMORY, JobLog
from megatron.monitor.slurm_jobs import Job
from megatron.training.progress import SLOW_SECONDS

STALE_SECONDS = 600.0
CLOCK_SECONDS = 60.0  # by which clocks may differ, and for which a run's own word of its end may be missing
REPEATED = 3  # failures in a row after which a person has to look

WAIT, RETRY, FIX, ESCALATE = "wait", "retry", "fix", "escalate"
# kind of a problem -> what to do about it, the gravest first: the first that a run has decides its action
ACTIONS = {
    "out_of_memory": ESCALATE,
    "nan": ESCALATE,
    "repeated_failures": ESCALATE,
    "bad_config": FIX,
    "dependency_never_satisfied": FIX,
    "cannot_start": FIX,
    "held": FIX,
    "disk": FIX,
    "crashed": FIX,
    "lost_rank": RETRY,
    "stale": RETRY,
    "node_failure": RETRY,
    "preempted": RETRY,
    "time_limit": RETRY,
    "stopped": RETRY,
    "lost": RETRY,
    "cancelled": None,
    "refused": None,
    "evaluation_failed": WAIT,
    "skipped_steps": WAIT,
    "older_status": WAIT,
    "clock": WAIT,
    "damaged_file": WAIT,
}
# those after which the same run continues by itself when SLURM starts its next job
_CONTINUED = {"crashed", "lost_rank", "node_failure", "preempted", "time_limit", "stopped", "lost"}
_BY_CODE = {
    UserError.exit_code: "bad_config",
    StopRequested.exit_code: "stopped",
    NumericsError.exit_code: "nan",
    LostRankError.exit_code: "lost_rank",
    MachineError.exit_code: "disk",
}
_BY_STATE = {
    "FAILED": "crashed",
    "BOOT_FAIL": "node_failure",
    "NODE_FAIL": "node_failure",
    "OUT_OF_MEMORY": "out_of_memory",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "PREEMPTED": "preempted",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
}
# reasons for which SLURM never starts a job, whatever becomes free
_NEVER = (
    *(
        "BadConstraints",
        "InvalidAccount",
        "InvalidQOS",
        "PartitionTimeLimit",
        "PartitionNodeLimit",
        "AccountNotAllowed",
    ),
    *("QOSNotAllowed", "AssocMaxWallDurationPerJobLimit", "QOSMaxWallDurationPerJobLimit", "PartitionConfig"),
)


@dataclass(frozen=True)
class Problem:
    """`kind`: a key of `ACTIONS`."""

    kind: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """The state of a run or job, its problems (the gravest first), and what to do: None when there is nothing."""

    state: str
    problems: tuple[Problem, ...]
    action: str | None
    reason: str


@dataclass(frozen=True)
class Evidence:
    """What is known of one run.

    Attributes:
        run: its folder; None for a job of which none is known.
        job: SLURM's newest job of the run, None without one.
        log: of that job, where it was read.
        now: seconds since 1970, by our clock.
        host: our name; `is_alive`: whether a process of a number runs here.
        answered: whether SLURM has told its jobs.
    """

    run: RunFolder | None
    job: Job | None
    log: JobLog | None
    now: float
    host: str
    is_alive: Callable[[int], bool]
    answered: bool = False

    @property
    def own_status(self) -> bool:
        """Whether `status.json` is that of the job's present start, and not of an older job or start."""
        if self.run is None or not self.run.status:
            return False
        if self.job is None or self.job.has_ended:
            return self.job is None or str(self.run.status.get("job_id")) == self.job.raw_id
        if self.run.status.get("job_id") is None:  # the job's rank 0 may lack SLURM's variables: then time decides
            return (number(self.run.status.get("heartbeat")) or 0.0) >= (self.job.start or self.now)
        same = str(self.run.status.get("job_id")) == self.job.raw_id
        return same and (whole(self.run.status.get("restart")) or 0) >= self.job.restarts

    @property
    def heartbeat_age(self) -> float | None:
        """Seconds since the last sign of progress; by the file's own time where the clock of the run's host differs."""
        if self.run is None:
            return None
        heartbeat, written = number(self.run.status.get("heartbeat")), self.run.written
        if heartbeat is None:
            return None
        running = self.run.status.get("state") in ("starting", "running")
        if running and written is not None and abs(written - heartbeat) > CLOCK_SECONDS:
            return max(0.0, self.now - written)
        return max(0.0, self.now - heartbeat)


def judge(evidence: Evidence) -> Verdict:
    """The verdict on one run."""
    run, job = evidence.run, evidence.job
    if job is not None and not job.has_ended:
        state, problems = _of_pending(evidence) if job.state == "PENDING" else _of_running(evidence)
    elif run is not None and run.status and evidence.own_status:
        state, problems = _of_status(evidence)
    elif job is not None:
        state, problems = _of_ended(evidence, job)
    else:
        state, problems = "unknown", []
    if run is not None:
        problems += [Problem("damaged_file", text) for text in run.damage]
        failed = [str(step) for step, one in sorted(run.evaluations.items()) if one == "failed"]
        if failed:
            problems.append(Problem("evaluation_failed", f"evaluations that failed: iterations {', '.join(failed)}"))
        if run.in_a_row >= REPEATED and state not in ("done", "training", "evaluation", "checkpoint"):
            text = f"{run.in_a_row} starts in a row failed or came no further"
            problems.append(Problem("repeated_failures", text))
    order = list(ACTIONS)
    problems.sort(key=lambda one: order.index(one.kind))
    return Verdict(state, tuple(problems), *_action(evidence, state, problems))


def _action(evidence: Evidence, state: str, problems: list[Problem]) -> tuple[str | None, str]:
    job, run = evidence.job, evidence.run
    if problems:
        worst = problems[0]
        action = ACTIONS[worst.kind]
        following = str(run.links[-1].get("next") or "") if run is not None and run.links else ""
        queued = job is not None and job.state == "PENDING"
        if worst.kind in _CONTINUED and (queued or following):
            by = "SLURM starts it again" if queued or following == "requeue" else f"job {following} continues it"
            return WAIT, f"{worst.text}; {by}"
        if job is not None and _is_ending(evidence, worst.kind):
            return WAIT, f"{worst.text}; SLURM has not ended job {job.job_id} yet"
        if worst.kind == "nan" and state == "training" and run is not None and not _is_bad_now(run):
            return WAIT, f"{worst.text}; the newest steps are finite"
        return action, worst.text
    if state == "done":
        return None, "trained to its end"
    if state == "pending" and job is not None:
        return WAIT, f"waits for SLURM: {job.reason or 'no reason given'}"
    return (WAIT, "no problem found") if state != "unknown" else (None, "nothing is known of it")


def _is_ending(evidence: Evidence, kind: str) -> bool:
    """Whether only SLURM's next word will tell what the end of a run was: a cancelled job is COMPLETING at first, and
    the script of one that was asked to stop may start it again."""
    job, age = evidence.job, evidence.heartbeat_age
    if job is None or job.has_ended:
        return False
    just_stopped = kind == "stopped" and evidence.own_status and age is not None and age < CLOCK_SECONDS
    return job.state == "COMPLETING" or (just_stopped and job.state == "RUNNING")


def _of_pending(evidence: Evidence) -> tuple[str, list[Problem]]:
    job = evidence.job
    assert job is not None
    reason = job.reason or "no reason given"
    if "DependencyNeverSatisfied" in reason:
        text = f"job {job.job_id} never starts: the job it depends on has failed (scancel {job.job_id})"
        return "pending", [Problem("dependency_never_satisfied", text)]
    if any(word in reason for word in _NEVER):
        return "pending", [Problem("cannot_start", f"job {job.job_id} never starts as it is: {reason}")]
    if "held" in reason.lower():
        return "pending", [Problem("held", f"{reason}: scontrol release {job.job_id}")]
    return "pending", []


def _of_running(evidence: Evidence) -> tuple[str, list[Problem]]:
    run, job, log = evidence.run, evidence.job, evidence.log
    assert job is not None
    if run is not None and evidence.own_status:
        return _of_status(evidence)
    problems = []
    crash = _crash_in(log)
    quiet = evidence.now - log.modified if log is not None else 0.0
    if crash is not None and quiet > CLOCK_SECONDS:
        problems.append(Problem(crash.kind, f"SLURM says RUNNING, but its log ends with: {crash.text}"))
    elif log is not None and quiet > STALE_SECONDS and not log.evaluates and _trains(job, log):
        problems.append(Problem("stale", f"its log is {minutes(quiet)} old"))
    if log is not None and log.iteration is not None and log.loss is None and run is None:
        problems.append(Problem("nan", f"the loss in its log is not finite at iteration {log.iteration}"))
    if run is not None and run.status:
        known = run.status.get("job_id")
        began = "" if job.start is None else f", {minutes(max(0.0, evidence.now - job.start))} after its start"
        of = "an earlier start" if str(known) == job.raw_id else f"job {known}" if known else "an earlier run"
        text = f"status.json is that of {of}: job {job.job_id} has not written yet{began}"
        problems.append(Problem("older_status", text))
    state = "starting" if run is not None or _trains(job, log) else "running"
    if crash is not None and problems:
        state = "failed"
    elif log is not None and (log.iteration is not None or log.evaluates):
        state = "evaluation" if log.evaluates else "training"
    return state, problems


def _trains(job: Job, log: JobLog | None) -> bool:
    """Whether a job of which no run is known is a training, and not something else that SLURM runs."""
    return job.name.startswith("neox-training") or (log is not None and log.start is not None)


def _of_status(evidence: Evidence) -> tuple[str, list[Problem]]:
    """By a `status.json` that is that of the job, or of a run without one."""
    run, job = evidence.run, evidence.job
    assert run is not None
    status = run.status
    in_slurm = job is not None and not job.has_ended
    if status.get("state") in ("ended", "failed"):
        return _of_written_end(evidence, in_slurm)
    if job is not None and job.has_ended:
        return _of_ended(evidence, job)
    problems = _silence(evidence)
    silent = [one for one in problems if one.kind != "clock"]
    if _gone(evidence):
        host, pid = status.get("host"), status.get("pid")
        return "failed", [Problem("crashed", f"its process {pid} on {host} is gone, and did not say why")]
    if status.get("job_id") and job is None and evidence.answered and silent:
        text = f"{silent[0].text}, and SLURM does not list job {status['job_id']}"
        return "failed", [Problem("lost", text)]
    problems += _numbers(run)
    activity = status.get("activity")
    state = "starting" if status.get("state") == "starting" else "training"
    if activity in ("evaluation", "checkpoint"):
        state = activity
    if any(one.kind in ("crashed", "out_of_memory") for one in problems):
        state = "failed"
    return state, problems


def _of_written_end(evidence: Evidence, in_slurm: bool) -> tuple[str, list[Problem]]:
    run = evidence.run
    assert run is not None
    code, reason = whole(run.status.get("exit_code")), str(run.status.get("reason") or "no reason given")
    if run.status.get("state") == "ended" and code == 0:
        step, total = whole(run.status.get("step")), whole(run.status.get("train_iters"))
        short = step is not None and total is not None and step < total
        return ("stopped", [Problem("stopped", reason)]) if short else ("done", [])
    kind = _BY_CODE.get(code if code is not None else 1, "crashed")
    if kind != "stopped" and run.status.get("state") == "ended":
        kind = "stopped"  # asked to end, without its last checkpoint
    state = "stopped" if kind == "stopped" else "failed"
    if kind in ("crashed", "lost_rank"):
        log = evidence.log
        if OUT_OF_MEMORY.search(reason) or (log is not None and log.out_of_memory):
            kind = "out_of_memory"
    job = evidence.job
    if job is not None and job.state in ("OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "TIMEOUT", "CANCELLED"):
        kind = _BY_STATE[job.state]
        reason = f"SLURM ended it ({job.state}); {reason}"
    if in_slurm and kind != "stopped":
        reason = f"SLURM says RUNNING, but the run has failed: {reason}"
    return state, [Problem(kind, reason)]


def _of_ended(evidence: Evidence, job: Job) -> tuple[str, list[Problem]]:
    """A job that SLURM ended, and whose run could not say how."""
    if job.state == "COMPLETED":
        return "done", []
    if job.was_refused:
        return "failed", [Problem("refused", f"SLURM did not accept job {job.job_id}: {job.reason or 'see sbatch'}")]
    kind, log = _BY_STATE.get(job.state, "crashed"), evidence.log
    text = f"SLURM ended job {job.job_id}: {job.state}"
    if job.state == "FAILED":
        text += f", exit code {job.exit_code.partition(':')[0] or '?'}" + (
            f": {log.error}" if log and log.error else ""
        )
        code = job.exit_code.partition(":")[0]
        kind = _BY_CODE.get(int(code) if code.isdigit() else 1, "crashed")
    if log is not None and log.out_of_memory and kind == "crashed":
        kind, text = "out_of_memory", f"{text}: {log.out_of_memory}"
    return ("stopped" if kind in ("stopped", "cancelled") else "failed"), [Problem(kind, text)]


def _silence(evidence: Evidence) -> list[Problem]:
    """No sign of progress, a crash that only the log knows, and clocks that differ."""
    run, log, age = evidence.run, evidence.log, evidence.heartbeat_age
    assert run is not None
    problems = []
    heartbeat = number(run.status.get("heartbeat"))
    written = run.written
    if heartbeat is not None:
        ahead = heartbeat - evidence.now
        differs = heartbeat - written if written is not None else 0.0
        by = ahead if ahead > CLOCK_SECONDS else differs if abs(differs) > CLOCK_SECONDS else 0.0
        if by:
            way = "ahead" if by > 0 else "behind"
            text = f"the clock of {run.status.get('host')} is {minutes(abs(by))} {way}: times of this run are not ours"
            problems.append(Problem("clock", text))
    if age is None:
        return problems
    crash = _crash_in(log)
    if crash is not None and age > CLOCK_SECONDS:
        where = "SLURM says RUNNING, but the log ends with: " if evidence.job is not None else "the log ends with: "
        return [Problem(crash.kind, where + crash.text), *problems]
    if age > _patience(run):
        what = f" during {run.status['activity']}" if run.status.get("activity") else ""
        problems.append(Problem("stale", f"no sign of progress for {minutes(age)}{what}"))
    return problems


def _patience(run: RunFolder) -> float:
    """Seconds that may pass between two signs of progress: an hour for what is known to last, as for its watchdog."""
    step, start = whole(run.status.get("step")) or 0, whole(run.status.get("start_step"))
    starts = run.status.get("state") == "starting" or start is None or step < start + 2
    if starts or run.status.get("activity") in ("evaluation", "checkpoint"):
        return SLOW_SECONDS
    seconds = [number(line.get("runtime/iteration_time")) or 0.0 for line in run.lines[-3:]]
    return max([STALE_SECONDS, *(3 * one for one in seconds)])


def _gone(evidence: Evidence) -> bool:
    """Whether the process of a run on this machine has ended without a word."""
    assert evidence.run is not None
    status = evidence.run.status
    pid = whole(status.get("pid"))
    here = status.get("host") == evidence.host and evidence.job is None
    return here and pid is not None and (evidence.heartbeat_age or 0.0) > 10.0 and not evidence.is_alive(pid)


def _numbers(run: RunFolder) -> list[Problem]:
    """Steps of the last logs that were NaN or skipped."""
    lines = run.lines[-10:]
    nan, skipped = (sum(int(number(line.get(f"train/{name}")) or 0) for line in lines) for name in ("nan", "skipped"))
    if not lines:
        return []
    first, last = lines[0].get("step"), lines[-1].get("step")
    if _is_bad_now(run) and not nan:
        all_skipped = lines[-1].get(LOSS) is not None
        what = "all its steps since the last log are skipped" if all_skipped else "its loss is not finite"
        return [Problem("nan", f"{what}, at iteration {last}")]
    if nan:
        return [Problem("nan", f"{nan} steps of NaN in the logs of iterations {first} to {last}")]
    if skipped:
        return [Problem("skipped_steps", f"{skipped} skipped steps in the logs of iterations {first} to {last}")]
    return []


def _is_bad_now(run: RunFolder) -> bool:
    """Whether the last log shows no finite step."""
    if not run.lines:
        return False
    last = run.lines[-1]
    if number(last.get("train/nan")):
        return True
    if LOSS not in last:  # steps that forget alone, which ga_loss_threshold may leave out
        return False
    skipped, step = number(last.get("train/skipped")) or 0, whole(last.get("step"))
    before = whole(run.lines[-2].get("step")) if len(run.lines) > 1 else whole(run.status.get("start_step"))
    all_skipped = skipped > 0 and step is not None and before is not None and skipped >= step - before
    return last[LOSS] is None or all_skipped


def _crash_in(log: JobLog | None) -> Problem | None:
    if log is None:
        return None
    if log.out_of_memory:
        return Problem("out_of_memory", log.out_of_memory)
    return Problem("crashed", log.error) if log.error else None


def minutes(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 5 min`, `2 days 3 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    whole_minutes = round(seconds / 60)
    if whole_minutes < 60:
        return f"{whole_minutes} min"
    hours, rest = divmod(whole_minutes, 60)
    return f"{hours} h {rest} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"
