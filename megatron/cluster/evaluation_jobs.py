"""Evaluations of a run's checkpoints by jobs of their own: who works on which, and what is recorded.

    <run folder>/eval_results/iteration_<step>.json    results, complete or not there
    <run folder>/eval_results/iteration_<step>/        what their job printed
    <run folder>/eval_results/jobs.json                an `Evaluation` a checkpoint; whether the run takes results in

The run and the jobs change `jobs.json` under a lock. A result is recorded by the run, or by its own job when the run
has ended: whoever does it notes each tracker at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron.checkpoint import layout
from megatron.cluster.launchers import RUN_MODULE
from megatron.cluster.node import with_library_on_path
from megatron.cluster.profile import find_profile
from megatron.cluster.slurm import Slurm, SlurmError, environment_for_next
from megatron.data.tokens.cache_lock import hold_lock
from megatron.errors import UserError
from megatron.files import from_json, read_json, write_atomically
from megatron.home import HOME
from megatron.log import get_logger

logger = get_logger(__name__)

FOLDER = "eval_results"
VERSION = 1
SCRIPT = HOME / "slurm" / "evaluate.sbatch"
SUBMITTED, RECORDED, FAILED, SKIPPED = "submitted", "recorded", "failed", "skipped"


@dataclass
class Evaluation:
    """The evaluation of one checkpoint.

    Attributes:
        state: submitted (until its results are recorded), recorded, failed or skipped.
        job: SLURM's number, or `PID:START` of a local process.
        reason: why it failed or was skipped.
        recorded: the trackers that have its results.
        checkpoint: its `identity`; a run that goes back replaces it, and its job may end only then.
    """

    state: str
    job: str | None = None
    reason: str | None = None
    recorded: list[str] = field(default_factory=list)
    checkpoint: int | None = None


class Evaluations:
    """Those of one run. `live`: the run takes results in; else their jobs do."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder.absolute()
        self.folder = self.run_folder / FOLDER
        self.file = self.folder / "jobs.json"
        self.live = False

    def results(self, step: int) -> Path:
        """The file of results of a checkpoint."""
        return self.folder / f"iteration_{step}.json"

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint."""
        return self.run_folder / layout.step_folder(step)

    def job_folder(self, step: int) -> Path:
        """What its job prints and writes on the way."""
        return self.folder / f"iteration_{step}"

    def log(self, step: int) -> Path:
        """What its job printed."""
        return self.job_folder(step) / "job.out"

    def read(self) -> dict[int, Evaluation]:
        """By step, without the lock. A damaged file counts as none: results are still there, jobs run again."""
        try:
            content = read_json(self.file)
            self.live = content.get("live") is True
            return {int(step): from_json(Evaluation, one) for step, one in content["jobs"].items()}
        except FileNotFoundError:
            return {}
        except (UserError, KeyError, ValueError, AttributeError) as error:
            logger.warning(f"{self.file} is damaged ({error}): checkpoints may be evaluated again")
            return {}

    @contextlib.contextmanager
    def change(self) -> Iterator[dict[int, Evaluation]]:
        """Read, let the caller change, write; nobody else does meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(self.folder / "jobs.lock", lambda: False, "to write jobs.json"):
            jobs = self.read()
            try:
                yield jobs
            finally:
                self.write(jobs)

    def write(self, jobs: Mapping[int, Evaluation]) -> None:
        """Replace the file; only inside `change`."""
        content = {
            "version": VERSION,
            "live": self.live,
            "jobs": {str(step): dataclasses.asdict(one) for step, one in sorted(jobs.items())},
        }
        write_atomically(self.file, json.dumps(content, indent=2) + "\n")


@dataclass(frozen=True)
class Submitter:
    """Starts evaluations: as jobs of SLURM (`kind` slurm), or as processes of this machine (local).

    Args:
        flags: of sbatch, after ours, so that they win.
        gpus: GPUs that one copy of the model needs; 0 on CPUs.
    """

    kind: str
    evaluations: Evaluations
    flags: Sequence[str] = ()
    gpus: int = 0

    def submit(self, step: int, checkpoint: int) -> str:
        """Start the evaluation of a checkpoint, known by its `identity`; returns what to know its job by.

        Raises `SlurmError`, `OSError`, or `UserError` for a cluster profile that cannot be read.
        """
        log = self.evaluations.log(step)
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = [str(self.evaluations.run_folder), str(step), f"--checkpoint={checkpoint}"]
        if self.kind == "local":
            return self._start(arguments, log)
        gpus = [f"--gpus-per-node={self.gpus}"] if self.gpus else []
        name = f"evaluate_{self.evaluations.run_folder.name}_{step}"
        ours = [f"--job-name={name}", f"--output={log}", "--open-mode=append", f"--chdir={Path.cwd()}", *gpus]
        env = environment_of_evaluation(os.environ, of_slurm=True)
        command = find_profile(os.environ).submit_command
        return Slurm(env=env).submit(*ours, *self.flags, str(SCRIPT), *arguments, command=command)

    def _start(self, arguments: list[str], log: Path) -> str:
        command = [sys.executable, "-u", str(RUN_MODULE), "megatron.jobs.evaluation", "--in-turn", *arguments]
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                env=environment_of_evaluation(os.environ, of_slurm=False),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # it outlives the run, whose end its results may come after
            )
        return f"{process.pid}:{psutil.Process(process.pid).create_time():.2f}"

    def running(self, jobs: Sequence[str]) -> set[str]:
        """Those of `jobs` that wait or run, as far as can be known."""
        if self.kind == "local":
            return {job for job in jobs if _process_runs(job)}
        try:
            queued = {row["raw_id"] for row in Slurm().queue("--me")} if jobs else set()
        except SlurmError:
            return set(jobs)  # the controller is away: that says nothing about them
        return queued & set(jobs)


def environment_of_evaluation(env: Mapping[str, str], *, of_slurm: bool) -> dict[str, str]:
    """The environment of a job that this one submits: ours without what belongs to this job."""
    kept = environment_for_next(env, devices=not of_slurm)
    kept.pop("DS_ACCELERATOR", None)  # of a rank: the evaluation may have GPUs where the run had none, or none
    return with_library_on_path({**kept, "DEEPY_HOME": str(HOME), "DEEPY_PYTHON": sys.executable})


def _process_runs(job: str) -> bool:
    pid, _, started = job.partition(":")
    try:
        process = psutil.Process(int(pid))
        same = abs(process.create_time() - float(started)) < 1.0
        return same and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except (psutil.Error, ValueError):
        return False
