"""lm-evaluation-harness on checkpoints, in jobs of their own next to the run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.task_evaluator import SPLIT
from megatron.callbacks.tracker import Tracker
from megatron.checkpoint.find import identity
from megatron.cluster.evaluation_jobs import FAILED, RECORDED, SKIPPED, SUBMITTED, Evaluation, Evaluations, Submitter
from megatron.cluster.slurm import SlurmError
from megatron.errors import UserError
from megatron.files import read_json
from megatron.log import get_logger
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

NAME = "evaluation_jobs"
_POLL_STEPS = 100  # where log_interval says nothing


@CALLBACKS.register(
    "evaluation_jobs",
    phase="score",
    idle={"eval_jobs": None},
    keys=("eval_jobs_sbatch", "eval_jobs_most", "eval_interval", "eval_tasks", "eval_suite"),
    loses="eval_jobs evaluates no checkpoint",
)
class EvaluationJobs(Callback):
    """Submits the evaluation of new checkpoints, and gives their results to the trackers at the checkpoint's step.

    A thread talks to SLURM, so that no step waits for it. What fails is a warning: it ends no run. Rank 0 alone.

    Args:
        every: the least number of steps between checkpoints that are evaluated; <= 0: only the last one is.
        most: how many may be unfinished.
        poll: steps between looks for results.
    """

    def __init__(self, submitter: Submitter, every: int, most: int, poll: int) -> None:
        self.submitter, self.every, self.most, self.poll = submitter, every, most, poll
        self.evaluations = submitter.evaluations
        self._open: set[int] = set()  # steps whose results are still to be recorded
        self._thread: threading.Thread | None = None

    @classmethod
    def build(cls, context: RunContext) -> EvaluationJobs | None:
        if context.state.rank != 0 or context.folder is None:
            return None
        args, options = context.args, context.args.generation
        # What one copy of the model needs; more are the user's to ask for (eval_jobs_sbatch).
        ranks = max(1, args.parallel.pipe_parallel_size) * max(1, args.parallel.model_parallel_size)
        gpus = ranks if context.state.device.type == "cuda" else 0
        submitter = Submitter(
            options.eval_jobs or "", Evaluations(context.folder), options.eval_jobs_sbatch or (), gpus
        )
        log_interval = args.logging.log_interval
        return cls(submitter, args.training.eval_interval, options.eval_jobs_most, max(log_interval, 0) or _POLL_STEPS)

    def loaded(self, trainer: Trainer) -> None:
        """Take up what an earlier start left: results, jobs that were lost, the checkpoint that it did not submit."""
        with _only_warn():
            self._wait()
            with self.evaluations.change() as jobs:
                self.evaluations.live = True
                for step in [step for step in jobs if step > trainer.step]:
                    del jobs[step]  # a run that went back replaces that checkpoint: what its job finds is dropped
                    self.evaluations.results(step).unlink(missing_ok=True)
                self._note(jobs)
            trainer.held_checkpoints[NAME] = set(self._open)
            self._record(trainer)
            wanted = trainer.saved_step is not None and self._wants(trainer.saved_step)
            self._start(trainer, trainer.saved_step if wanted else None, resubmit=True)

    def saved(self, trainer: Trainer, path: str) -> None:
        with _only_warn():
            self._wait()
            step = trainer.saved_step
            if step is not None and self._wants(step):
                self._start(trainer, step)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if due(trainer.step, self.poll) and not (self._thread is not None and self._thread.is_alive()):
            self._record(trainer)
            trainer.held_checkpoints[NAME] = set(self._open)

    def end(self, trainer: Trainer) -> None:
        with _only_warn():
            self._wait()
            finished = trainer.step >= (trainer.args.training.train_iters or 0)
            known = self.evaluations.read().get(trainer.step)
            if finished and trainer.saved_step == trainer.step and (known is None or known.state == SKIPPED):
                self._start(trainer, trainer.step, last=True)
                self._wait()
        self._leave(trainer)
        if self._open:
            steps, where = ", ".join(map(str, sorted(self._open))), self.evaluations.folder
            logger.info(f"evaluations of iterations {steps} go on; their jobs record the results ({where})")

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        """Record what there is; from now on the jobs record their results themselves."""

        def leave() -> None:
            self.evaluations.live = False

        with _only_warn():
            record_results(self.evaluations, _trackers(trainer), last=leave)
            self._note(self.evaluations.read())

    def _wants(self, step: int) -> bool:
        """Whether the checkpoint is to be evaluated, and not yet known."""
        known = self.evaluations.read()
        before = max((one for one in known if one < step), default=None)
        return step not in known and self.every > 0 and (before is None or step - before >= self.every)

    def _record(self, trainer: Trainer) -> None:
        """Record the results of one checkpoint (W&B keeps one value of a metric a step), if there are some."""
        if any(self._has_results(step) for step in self._open):
            with _only_warn():
                self._open -= set(record_results(self.evaluations, _trackers(trainer), most=1))

    def _start(self, trainer: Trainer, step: int | None, **options: bool) -> None:
        """Submit the evaluation of a checkpoint, which is not deleted until its results are there."""
        if step is not None:
            self._open.add(step)
            trainer.held_checkpoints[NAME] = set(self._open)
        self._thread = threading.Thread(
            target=self._tend, args=(step,), kwargs=options, name="evaluation_jobs", daemon=True
        )
        self._thread.start()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _tend(self, step: int | None, last: bool = False, resubmit: bool = False) -> None:
        """See which jobs are gone without results, then submit that of `step`. In a thread: nothing is raised."""
        try:
            with self.evaluations.change() as jobs:
                self._look_after(jobs, resubmit)
                if step is not None:
                    jobs[step] = self._begin(jobs, step, last)
                self._note(jobs)
        except Exception as error:  # of whatever class: a thread has nobody above it
            logger.warning(f"eval_jobs: {type(error).__name__}: {error}")

    def _note(self, jobs: Mapping[int, Evaluation]) -> None:
        """Which results are still to be recorded; evaluations that came to nothing are reported."""
        for step in sorted(self._open):
            if step in jobs and jobs[step].state in (FAILED, SKIPPED):
                logger.warning(f"the checkpoint of iteration {step} is not evaluated: {jobs[step].reason}")
        self._open = {step for step, one in jobs.items() if one.state == SUBMITTED}

    def _look_after(self, jobs: dict[int, Evaluation], resubmit: bool) -> None:
        """Jobs that left no results have failed; at the start of a run, which may have been killed with them, they are
        submitted again."""
        without = {step: one for step, one in jobs.items() if one.state == SUBMITTED and not self._has_results(step)}
        running = self.submitter.running([one.job for one in without.values() if one.job is not None])
        for step, one in without.items():
            if one.job in running or self._has_results(step):  # it may have ended just now
                continue
            if resubmit:
                jobs[step] = self._begin({}, step, last=True)
            else:
                jobs[step] = replace(one, state=FAILED, reason=f"job {one.job} left no results, see {self._log(step)}")

    def _begin(self, jobs: Mapping[int, Evaluation], step: int, last: bool) -> Evaluation:
        """Submit the evaluation of a checkpoint, unless too many wait."""
        checkpoint = identity(self.evaluations.checkpoint(step))
        if checkpoint is None:
            return Evaluation(FAILED, reason="the checkpoint is not there")
        waiting = [one for one in jobs if jobs[one].state == SUBMITTED and not self._has_results(one)]
        if len(waiting) >= self.most and not last:
            others = ", ".join(map(str, waiting))
            why = f"those of {others} are not done (eval_jobs_most: {self.most})"
            return Evaluation(SKIPPED, reason=why, checkpoint=checkpoint)
        try:
            self.evaluations.results(step).unlink(missing_ok=True)  # of a checkpoint that this one replaced
            job = self.submitter.submit(step, checkpoint)
        except (SlurmError, UserError, OSError) as error:
            return Evaluation(FAILED, reason=str(error), checkpoint=checkpoint)
        logger.info(f"job {job} evaluates the checkpoint of iteration {step}")
        return Evaluation(SUBMITTED, job, checkpoint=checkpoint)

    def _has_results(self, step: int) -> bool:
        return self.evaluations.results(step).exists()

    def _log(self, step: int) -> Path:
        return self.evaluations.log(step)


@contextlib.contextmanager
def _only_warn() -> Iterator[None]:
    """Evaluations are no reason to end a run: a full disk, a file that cannot be read."""
    try:
        yield
    except (OSError, UserError) as error:
        logger.warning(f"eval_jobs: {error}")


def record_results(
    evaluations: Evaluations,
    trackers: Sequence[Tracker],
    most: int | None = None,
    last: Callable[[], None] = lambda: None,
) -> list[int]:
    """Give results that nobody has recorded to the trackers, each once, at most those of `most` checkpoints.

    Returns the steps that are recorded now, or can never be. A tracker that fails gets them at the next call. `last` is
    called before anybody else may change what is known of the evaluations.
    """
    done: list[int] = []
    with evaluations.change() as jobs:
        for step, one in jobs.items():
            if one.state != SUBMITTED or not evaluations.results(step).exists() or len(done) == most:
                continue
            metrics = _read_metrics(evaluations, step, one)
            for tracker in trackers if metrics else ():
                if (name := type(tracker).__name__) not in one.recorded and _give(tracker, metrics, step):
                    one.recorded.append(name)
                    evaluations.write(jobs)  # at once: who is killed here has recorded it
            if one.state == SUBMITTED and all(type(tracker).__name__ in one.recorded for tracker in trackers):
                one.state = RECORDED
                logger.info(f"recorded the evaluation of iteration {step}: {evaluations.results(step)}")
            if one.state != SUBMITTED:
                done.append(step)
        last()
    return done


def _read_metrics(evaluations: Evaluations, step: int, one: Evaluation) -> dict[str, float]:
    """The metrics for trackers; where there are none, `one` has failed."""
    from megatron.inference.tasks import flat_metrics  # needs the harness, which other runs need not have installed

    problem, metrics = "no task has a result", {}
    try:
        results: dict[str, Any] = read_json(evaluations.results(step))
        metrics = {f"{SPLIT}/{name}": value for name, value in flat_metrics(results).items()}
    except (UserError, KeyError, AttributeError) as error:
        problem = f"its results cannot be read ({error!r})"
    if not metrics:
        one.state, one.reason = FAILED, f"{problem}, see {evaluations.log(step)}"
        logger.warning(f"the checkpoint of iteration {step} has no scores: {one.reason}")
    return metrics


def _give(tracker: Tracker, metrics: dict[str, float], step: int) -> bool:
    """Whether a tracker has taken the metrics, or had them."""
    try:
        if not tracker.holds(metrics, step):
            tracker.write_late(metrics, step)
    except Exception as error:  # of a tracker's package and its server: no reason to end a run
        logger.warning(f"{type(tracker).__name__} did not take the evaluation of iteration {step}: {error}")
        return False
    return True


def _trackers(trainer: Trainer) -> list[Tracker]:
    return [callback for callback in trainer.callbacks if isinstance(callback, Tracker)]
