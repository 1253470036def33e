"""Publish every checkpoint of a run, the newest first: as SLURM jobs, or without SLURM one after the other.

huggingface/batch_submit_checkpoints.sh my-run my-org --upload-delay random
huggingface/batch_submit_checkpoints.sh checkpoints/my-run --dry-run

A job is named convert_<run>, and starts when the one before has ended. What the Hub has completely is left out.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout
from megatron.checkpoint.find import Checkpoint, Listing, find_checkpoint, list_checkpoints
from megatron.cluster.profile import ClusterProfile, checkpoints_folder, find_profile, sbatch_flags
from megatron.cluster.slurm import Slurm, SlurmError, environment_for_next, parse_time, submission
from megatron.errors import DeepyError, MachineError, UserError, nearest, run_cli
from megatron.flags import Parser
from megatron.home import HOME
from megatron.hub.names import read_names
from megatron.hub.publish import RANDOM_DELAY, Options, Publication, check_experiments
from megatron.hub.push import check_hub
from megatron.hub.retry import retry_of
from megatron.log import ProgressBar, configure, get_logger, result

logger = get_logger(__name__)

NAMES = HOME / "huggingface" / "names"
JOB = HOME / "slurm" / "run_on_compute.sbatch"
UPLOAD = HOME / "huggingface" / "upload_checkpoint.py"
CONVERTED = "hf_checkpoints"  # next to the run
TASKS = "lambada_openai,piqa,hellaswag,arc_easy"
YOU = "<you>"  # the owner in a dry run, which does not ask the Hub who is logged in
WORK = 4 * 3600.0  # seconds that a job is given besides its delay and its retries
CPUS = 4  # of a job: a conversion needs few, and small nodes have no more
STAGGER = 30.0  # seconds between the uploads of jobs that get a delay


def parser_of_one(description: str | None) -> Parser:
    """The flags of `upload_checkpoint.py`."""
    flags, _ = _flags(description)
    flags.add_argument("experiment", metavar="EXPERIMENT_OR_FOLDER", help="a run's name or folder, or a checkpoint")
    flags.add_argument("step", nargs="?", metavar="STEP", help="of the checkpoint; default: the latest")
    flags.add_argument("org", nargs="?", metavar="ORG", help="owner on the Hub; default: you")
    flags.add_argument("--dry-run", action="store_true", help="print what would be uploaded where; needs no network")
    return flags


def publish_one(arguments: Sequence[str] | None, environment: Mapping[str, str], description: str | None) -> int:
    """`upload_checkpoint.py`: publish one checkpoint."""
    given = parser_of_one(description).parse_intermixed_args(arguments)
    if given.step is not None and not given.step.isdigit() and given.org is None:
        given.step, given.org = None, given.step
    if given.step is not None and not given.step.isdigit():
        raise UserError(f"STEP: {given.step!r} is no step of a checkpoint")
    configure()
    run = _Run(given, environment)
    checkpoint = run.find(None if given.step is None else int(given.step))
    one = run.publication(checkpoint)
    if given.dry_run:
        result("\n".join(one.plan))
    else:
        one.run()
    return 0


def main() -> int:
    """`batch_submit_checkpoints.sh`."""
    return publish_all(sys.argv[1:], os.environ)


def publish_all(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Publish every checkpoint of an experiment, the newest first."""
    flags, shared = _flags(__doc__, "batch_submit_checkpoints.sh")
    flags.add_argument("experiment", metavar="EXPERIMENT_OR_FOLDER", help="a run's name or folder")
    flags.add_argument("org", nargs="?", metavar="ORG", help="owner on the Hub; default: you")
    flags.add_argument("--no-singleton", action="store_true", help="let the jobs run at the same time")
    flags.add_argument(
        "--delay-between-jobs", type=_seconds, default=0.0, metavar="SECONDS", help="wait between submissions (0)"
    )
    flags.add_argument(
        "--sbatch", default="", metavar="FLAGS", help='further flags of sbatch: "--time=2:00:00 --mem=64G"'
    )
    flags.add_argument("--dry-run", action="store_true", help="print the jobs; needs no network")
    given = flags.parse_intermixed_args(_join_value("--sbatch", arguments))
    given.skip_if_exists = True
    configure()
    run = _Run(given, environment)
    listing = run.listing
    for name, problem in listing.incomplete.items():
        logger.warning(f"{listing.root / name} is left out: {problem}")
    if not listing.steps:
        raise UserError(f"{listing.root}: nothing to publish: {listing.describe()}")
    waiting = [listing.checkpoints[step] for step in sorted(listing.steps, reverse=True)]
    if not given.dry_run:
        waiting = _leave_out_published(run, waiting)
    if run.has_slurm:
        _submit(run, waiting, _as_arguments(shared, given))
    elif given.dry_run:
        result("\n".join(line for checkpoint in waiting for line in run.publication(checkpoint).plan))
    else:
        _publish_in_turn(run, waiting)
    return 0


def _leave_out_published(run: _Run, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Those that the Hub does not have completely. Raises `UserError` where it has another checkpoint."""
    waiting = []
    for checkpoint in checkpoints:
        one = run.publication(checkpoint)
        if one.is_complete():
            result(f"{checkpoint.path.name}: published already")
        else:
            one.check()
            waiting.append(checkpoint)
    return waiting


def _submit(run: _Run, checkpoints: Sequence[Checkpoint], options: Sequence[str]) -> None:
    """A job for each checkpoint, in this order."""
    given, slurm = run.given, Slurm(env=environment_for_next(run.environment))
    name, delay = f"convert_{run.experiment}", given.upload_delay
    flags = run.job_flags(name, len(checkpoints)) if checkpoints else []
    for count, checkpoint in enumerate(checkpoints):
        if count and given.delay_between_jobs and not given.dry_run:
            time.sleep(given.delay_between_jobs)
        later = [f"--upload-delay={delay + count * STAGGER:g}"] if delay else []
        command = [sys.executable, str(UPLOAD), str(run.root), str(checkpoint.manifest.step)]
        command += [] if run.owner == YOU else [run.owner]
        job = [*flags, str(JOB), *command, *options, *later]
        if given.dry_run:
            result(shlex.join([*submission(run.profile.submit_command), *job]))
        else:
            submitted = slurm.submit(*job, command=run.profile.submit_command)
            result(f"{checkpoint.path.name}: job {submitted}")
    if not given.dry_run and checkpoints:
        logger.info(f"{len(checkpoints)} jobs, named {name}; squeue --name={name} shows them")


def _publish_in_turn(run: _Run, checkpoints: Sequence[Checkpoint]) -> None:
    """Here, one after the other; one that fails does not keep the others back."""
    failed: dict[str, DeepyError] = {}
    with ProgressBar(f"publishing {run.experiment}", len(checkpoints), "checkpoints", ends=True) as bar:
        for checkpoint in checkpoints:
            try:
                run.publication(checkpoint).run()
            except DeepyError as error:
                failed[checkpoint.path.name] = error
                logger.warning(f"{checkpoint.path.name} was not published: {error}")
            bar(1)
    if failed:
        kind = MachineError if any(isinstance(error, MachineError) for error in failed.values()) else UserError
        raise kind(f"not published: {', '.join(failed)}, see above. The same command resumes.")


class _Run:
    """The run that the command line names: its folder, its name, and who will own it."""

    def __init__(self, given: argparse.Namespace, environment: Mapping[str, str]) -> None:
        self.given, self.environment = given, environment
        self.profile: ClusterProfile = find_profile(environment, given.cluster)
        self.options = _options(given)
        self.names = read_names(given.names, NAMES)
        folder = self._find_folder()
        self.step = layout.step_of(folder.name)
        self.root = folder.parent if self.step is not None else folder
        self.experiment = layout.run_name(self.root)
        check_experiments(self.names, self.root)
        self.output = Path(given.output_dir or self.root.parent / CONVERTED).absolute()
        self.owner = self._find_owner()

    @property
    def base(self) -> Path:
        """Where checkpoints lie: the flag, else DEEPY_CHECKPOINTS, else the cluster profile's, else this folder."""
        named = self.given.checkpoints_base_dir or checkpoints_folder(self.environment, self.given.cluster)
        return Path(named or ".").absolute()

    @property
    def has_slurm(self) -> bool:
        """Raises `UserError` where the profile has a command of its own that is not there."""
        command = self.profile.submit_command
        if shutil.which(submission(command)[0], path=self.environment.get("PATH")) is not None:
            return True
        if command != "sbatch":
            where = self.profile.lines["submit_command"]
            raise UserError(f"{where}: submit_command: there is no {submission(command)[0]} on the PATH")
        return False

    @property
    def listing(self) -> Listing:
        """All checkpoints of the run, GPT-NeoX's too."""
        return list_checkpoints(self.root, neox=True)

    def find(self, step: int | None) -> Checkpoint:
        """The checkpoint of a step; None: that which was named, or the latest."""
        if self.step is not None and step not in (None, self.step):
            raise UserError(f"{self.given.experiment} is a checkpoint, but STEP is {step}")
        return find_checkpoint(self.root, self.step if step is None else step, key="EXPERIMENT_OR_FOLDER")

    def publication(self, checkpoint: Checkpoint) -> Publication:
        return Publication(checkpoint, self.experiment, self.owner, self.names, self.output, self.options)

    def job_flags(self, name: str, jobs: int) -> list[str]:
        """Those of sbatch for so many jobs; of two flags with one name the later, which is the user's, wins."""
        logs = Path(self.profile.folder("logs", self.environment) or ".").absolute()
        if not self.given.dry_run:
            logs.mkdir(parents=True, exist_ok=True)
        flags = [f"--job-name={name}", f"--output={logs}/%x-%j.out", "--nodes=1", "--ntasks=1"]
        flags += [f"--cpus-per-task={CPUS}"]
        flags += [] if self.given.no_singleton else ["--dependency=singleton"]
        flags += [] if self.options.tasks else ["--gpus=0"]  # a conversion computes on the CPU
        flags += [f"--export=ALL,DEEPY_CLUSTER={self.given.cluster}"] if self.given.cluster else []
        users = shlex.split(self.given.sbatch)
        return [*flags, *sbatch_flags(self.profile), *self._time_flag(jobs, users), *users]

    def _time_flag(self, jobs: int, users: Sequence[str]) -> list[str]:
        """Time for the longest delay, for retries and for the work, as far as profile and partition allow it."""
        if self.environment.get("SBATCH_TIMELIMIT"):
            return []
        delay, retry = self.given.upload_delay, self.options.retry
        longest = RANDOM_DELAY if delay is None else delay + (jobs - 1) * STAGGER if delay else 0.0
        seconds = longest + retry.max_retries * retry.max_wait + WORK
        chosen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        default = self.profile.partition or self.environment.get("SBATCH_PARTITION")
        chosen.add_argument("-p", "--partition", default=default)
        limits = [parse_time(self.profile.time or "")]
        with suppress(SlurmError):  # not known then
            limits.append(Slurm(env=self.environment).time_limit(chosen.parse_known_args(users)[0].partition))
        limit = min((each for each in limits if each is not None), default=seconds)
        if limit < longest + WORK:
            logger.warning(
                f"jobs may run for {limit / 3600:.3g} hours here, but wait for up to {longest / 3600:.3g} and then "
                "have to convert and upload: give a shorter --upload-delay, or another partition or time with --sbatch"
            )
        minutes, second = divmod(int(min(seconds, limit)), 60)
        return [f"--time={minutes // 60}:{minutes % 60:02}:{second:02}"]

    def _find_folder(self) -> Path:
        name = self.given.experiment
        for path in (self.base / name, Path(name)):
            if path.is_dir():
                return path.resolve()
        there = [path.name for path in sorted(self.base.iterdir()) if path.is_dir()] if self.base.is_dir() else []
        raise UserError(
            f"{name}: no such folder, neither in {self.base} (--checkpoints-base-dir) nor here.{nearest(name, there)}"
        )

    def _find_owner(self) -> str:
        if self.given.org:
            return str(self.given.org)
        return YOU if self.given.dry_run else check_hub("model", self.options.retry).partition("/")[0]


def _options(given: argparse.Namespace) -> Options:
    if given.upload_neox_only and given.skip_neox_upload:
        raise UserError("--upload-neox-only and --skip-neox-upload leave nothing to upload")
    return Options(
        private=not given.public,
        retry=retry_of(given),
        delay=given.upload_delay,
        model=not given.upload_neox_only,
        raw=not given.skip_neox_upload,
        skip_complete=given.skip_if_exists,
        tasks=tuple(task for task in given.eval_tasks.split(",") if task) if given.eval else (),
        task_include_path=given.task_include_path,
        eval_batch_size=given.eval_batch_size,
        wandb={"project": given.wandb_project, "entity": given.wandb_entity} if given.wandb_project else {},
        replace=given.replace,
        delete_local=given.delete_local,
        tokenizer=given.tokenizer,
        architecture=given.architecture,
        precision=given.precision,
        base_model=given.base_model,
        config_files=tuple(given.config_file),
    )


def _flags(description: str | None, program: str | None = None) -> tuple[Parser, list[argparse.Action]]:
    """The flags that both commands have; second: those that a job is passed."""
    from megatron.convert.cli import add_precision, add_upload_flags

    flags = Parser(program, description=description)
    first = len(flags._actions)
    flags.add_argument(
        "--upload-delay",
        type=_delay,
        default=0.0,
        metavar="SECONDS|random",
        help="wait before the first upload (0); random: up to 12 hours",
    )
    add_upload_flags(flags)
    flags.add_argument("--upload-neox-only", action="store_true", help="upload the raw checkpoint alone")
    flags.add_argument("--skip-neox-upload", action="store_true", help="do not upload the raw checkpoint")
    flags.add_argument(
        "--upload-neox", dest="skip_neox_upload", action="store_false", default=False, help="upload it (the default)"
    )
    flags.add_argument(
        "--skip-if-exists", action="store_true", help="do nothing where the Hub has all files, judged by their hashes"
    )
    flags.add_argument(
        "--replace", action="store_true", help="also where the Hub has another checkpoint under this name and step"
    )
    flags.add_argument("--eval", action="store_true", help="evaluate the converted model, after it was uploaded")
    flags.add_argument("--skip-eval", dest="eval", action="store_false", default=False, help="do not (the default)")
    flags.add_argument("--eval-tasks", default=TASKS, metavar="TASK,TASK", help=f"of lm-evaluation-harness ({TASKS})")
    flags.add_argument("--task-include-path", type=_path, metavar="FOLDER", help="with tasks of your own")
    flags.add_argument("--eval-batch-size", default="8", metavar="N", help="8; auto: as many as fit")
    flags.add_argument("--wandb-project", metavar="NAME", help="log the evaluation to this project of W&B")
    flags.add_argument("--wandb-entity", metavar="NAME", help="its team or user")
    flags.add_argument(
        "--checkpoints-base-dir",
        type=_path,
        metavar="FOLDER",
        help="with the experiments; default: DEEPY_CHECKPOINTS, else the cluster profile's folder, else this one",
    )
    flags.add_argument(
        "--output-dir", type=_path, metavar="FOLDER", help=f"for converted models ({CONVERTED} next to the run)"
    )
    flags.add_argument("--delete-local", action="store_true", help="delete the converted model once the Hub has it all")
    flags.add_argument("--tokenizer", type=_path, metavar="PATH", help="a Hugging Face tokenizer to publish with it")
    flags.add_argument(
        "--names", type=_path, metavar="FILE", help=f"rules for names: a file, or one of {_known_names()}"
    )
    flags.add_argument("--base-model", metavar="ID", help="what training began from, for the card")
    flags.add_argument("--architecture", help="neox, llama, ...; default: the first that can express the model")
    flags.add_argument("--config_file", nargs="+", type=_path, default=(), metavar="YAML", help="of a GPT-NeoX folder")
    add_precision(flags, auto="as trained")
    flags.add_argument("--cluster", metavar="NAME", help="cluster profile (slurm/README.md)")
    return flags, flags._actions[first:]


def _known_names() -> str:
    return ", ".join(sorted(path.stem for path in NAMES.glob("*.yml")))


def _as_arguments(actions: Sequence[argparse.Action], given: argparse.Namespace) -> list[str]:
    """The flags again, as they were given: those that differ from their default; without the delay, which each job
    has of its own unless it is random."""
    found: list[str] = []
    for action in actions:
        name, value = action.option_strings[-1], getattr(given, action.dest)
        if action.dest == "upload_delay":
            found += [f"{name}=random"] if value is None else []
        elif value != action.default and (action.nargs != 0 or value == action.const):
            found += _written(name, action, value)
    return found


def _written(name: str, action: argparse.Action, value: Any) -> list[str]:
    if action.nargs == 0:
        return [name]
    return [name, *map(str, value)] if isinstance(value, list | tuple) else [f"{name}={value}"]


def _join_value(name: str, arguments: Sequence[str]) -> list[str]:
    """`NAME VALUE` as `NAME=VALUE`: argparse takes a separate value that begins with `-` for another flag."""
    joined: list[str] = []
    for one in arguments:
        if joined[-1:] == [name]:
            joined[-1] = f"{name}={one}"
        else:
            joined.append(one)
    return joined


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def _delay(text: str) -> float | None:
    """Seconds; None for `random`."""
    return None if text == "random" else _seconds(text)


def _path(text: str) -> str:
    """An existing path as absolute, since a job may start elsewhere; anything else as it is."""
    return str(Path(text).absolute()) if Path(text).exists() or "/" in text and text.startswith(".") else text


if __name__ == "__main__":
    run_cli(main)
