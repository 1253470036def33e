"""The job that evaluates one checkpoint of a run by `eval.py` with its own config, and puts results where it looks.

By hand, for a checkpoint that was not evaluated:

    python -m megatron.jobs.evaluation checkpoints 1000
    sbatch --partition=low slurm/evaluate.sbatch checkpoints 1000
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron import log
from megatron.callbacks import RunContext, build_callbacks
from megatron.callbacks.evaluation_jobs import record_results
from megatron.callbacks.metrics_file import MetricsFile
from megatron.callbacks.tracker import Tracker
from megatron.checkpoint import layout
from megatron.checkpoint.find import identity, list_checkpoints
from megatron.checkpoint.lock import is_held
from megatron.cluster.evaluation_jobs import FAILED, SUBMITTED, Evaluation, Evaluations, environment_of_evaluation
from megatron.data.tokens.cache_lock import hold_lock
from megatron.errors import StopRequested, UserError, run_cli
from megatron.flags import Parser
from megatron.home import HOME
from megatron.log import get_logger
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs

logger = get_logger(__name__)

_SILENT_SECONDS = 60.0  # a run on another host touches its lock every 10 s
# Not of the run: where its ranks were, and what it writes.
_OVERRIDES = (
    *("hostfile=null", "include=null", "exclude=null", "num_nodes=-1", "num_gpus=null", "force_multi=false"),
    *("use_wandb=false", "use_comet=false", "use_trackio=false", "prometheus_file=null", "tensorboard_dir=null"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, unless there are results; record them, unless the run does. Returns the exit code of eval.py."""
    parser = Parser(
        prog="python -m megatron.jobs.evaluation",
        description=__doc__,
    )
    parser.add_argument("run_folder", type=Path, help="the folder `save` of the run")
    parser.add_argument("step", type=int, help="the iteration of the checkpoint")
    parser.add_argument(
        "--checkpoint", type=int, metavar="CRC", help="of its manifest: results of another one in its place are dropped"
    )
    parser.add_argument(
        "--in-turn", action="store_true", help="at low priority, after others that were given this flag"
    )
    given = parser.parse_args(argv)
    log.configure()
    evaluations = Evaluations(given.run_folder)
    config = evaluations.checkpoint(given.step) / layout.CONFIGS / layout.RESOLVED
    if not config.is_file():
        raise UserError(f"{config} is missing: {given.run_folder} has no complete checkpoint of iteration {given.step}")
    job = _Job(evaluations, given.step, given.checkpoint)
    with evaluations.change() as jobs:  # the run, which may be submitting this job, has written it down
        if not job.counts(jobs):
            return 0
    code = 0
    job.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".results-", dir=job.folder) as scratch:
        if not evaluations.results(given.step).exists():
            with _turn(evaluations) if given.in_turn else contextlib.nullcontext():
                code = _evaluate(evaluations, given.step, config, Path(scratch))
        if code != StopRequested.exit_code:  # asked to stop: SLURM starts it again, or the run's next start does
            _close(job, config, code, Path(scratch))
    return code


class _Job:
    """The evaluation of the checkpoint with the `identity` that is `asked` for, else of the one that is there now."""

    def __init__(self, evaluations: Evaluations, step: int, asked: int | None) -> None:
        self.evaluations, self.step, self.by_run = evaluations, step, asked is not None
        self.folder = evaluations.job_folder(step)
        self.checkpoint = identity(evaluations.checkpoint(step)) if asked is None else asked

    def counts(self, jobs: Mapping[int, Evaluation]) -> bool:
        """Whether its results are those of the run at this step, which is said when they are not."""
        known = jobs.get(self.step)
        if known is not None and known.checkpoint is not None:
            found = known.checkpoint == self.checkpoint
        else:
            there = identity(self.evaluations.checkpoint(self.step)) == self.checkpoint
            line = list_checkpoints(self.evaluations.run_folder)
            found = not self.by_run and there and self.step not in line.abandoned
        if not found:
            logger.warning(f"the run went back from this checkpoint of iteration {self.step}: it is not evaluated")
        return found


@contextlib.contextmanager
def _turn(evaluations: Evaluations) -> Iterator[None]:
    os.nice(19)
    with hold_lock(evaluations.folder / "turn.lock", lambda: False, "to evaluate a checkpoint"):
        yield


def _evaluate(evaluations: Evaluations, step: int, config: Path, folder: Path) -> int:
    """Run eval.py, with its results in `folder`. Returns its exit code."""
    launcher = "slurm" if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1 else "pdsh"
    own = (f"load={evaluations.run_folder}", f"iteration={step}", f"eval_results_prefix={folder / 'results'}")
    command = [sys.executable, "-u", str(HOME / "deepy.py"), str(HOME / "eval.py"), str(config)]
    env = os.environ if launcher == "slurm" else environment_of_evaluation(os.environ, of_slurm=False)
    return subprocess.run([*command, *own, *_OVERRIDES, f"launcher={launcher}"], env=env, check=False).returncode


def _close(job: _Job, config: Path, code: int, folder: Path) -> None:
    """Give the results in `folder` the name that the run waits for, or note a failure; record results where no run is
    there to do it."""
    evaluations, step = job.evaluations, job.step
    with evaluations.change() as jobs:
        if not job.counts(jobs):
            return
        for made in folder.glob("results_eval_results_*.json"):
            os.replace(made, evaluations.results(step))
        found = evaluations.results(step).exists()
        if step not in jobs or (found and jobs[step].state != SUBMITTED and not jobs[step].recorded):
            jobs[step] = Evaluation(SUBMITTED, checkpoint=job.checkpoint)  # started by hand
        if not found:
            reason = f"eval.py ended with exit code {code}, see {evaluations.log(step)}"
            jobs[step] = replace(jobs[step], state=FAILED, reason=reason)
            return
    if evaluations.live and _is_alive(evaluations):
        logger.info(f"the run records {evaluations.results(step)}")
        return
    trackers = _trackers(config, evaluations.run_folder)
    try:
        record_results(evaluations, trackers)
    finally:
        for tracker in trackers:
            tracker.close()


def _is_alive(evaluations: Evaluations) -> bool:
    """Whether the run that takes results in still runs: `jobs.json` was written just now, by the same file system."""
    lock = evaluations.run_folder / layout.LOCK
    with contextlib.suppress(FileNotFoundError):
        silent = evaluations.file.stat().st_mtime - lock.stat().st_mtime
        return is_held(evaluations.run_folder) and silent < _SILENT_SECONDS
    return False


def _trackers(config: Path, folder: Path) -> list[Tracker]:
    """Those of the run; without a network only its file of metrics, and the next start gives the rest to the others."""
    args = NeoXArgs.from_ymls([str(config)])
    context = RunContext(args, ParallelState.single("cpu"), 0, folder)
    try:
        return [one for one in build_callbacks(context, Tracker) if isinstance(one, Tracker)]
    except Exception as error:  # of a tracker's package and its server
        logger.warning(f"only metrics.jsonl gets the results now: {type(error).__name__}: {error}")
        return [MetricsFile(folder / "metrics.jsonl")]


if __name__ == "__main__":
    run_cli(main)
