"""How a SLURM job trains: what pretrain_neox.sbatch runs, with its arguments.

It adapts the configuration to the cluster, checks the nodes, runs `deepy.py train.py` and decides by how that ended
whether another job follows (`chain.py`). Outside of a SLURM job it only trains.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron import log
from megatron.checkpoint.find import list_checkpoints
from megatron.checkpoint.lock import SaveLock, is_held
from megatron.cluster.command_line import parse_launcher_command_line
from megatron.cluster.devices import end_of_job
from megatron.cluster.launchers import SRUN_TASK_LINE, expand_nodelist
from megatron.cluster.local import JobEnd, LocalJob, run_local
from megatron.cluster.profile import find_profile
from megatron.cluster.slurm import Slurm, SlurmError
from megatron.cluster.status import StatusFile, run_folder, slurm_job
from megatron.errors import DeepyError, LostRankError, StopRequested, UserError, run_cli
from megatron.home import HOME
from megatron.jobs import preflight
from megatron.jobs.chain import (
    CHAIN,
    MOST_FAILURES,
    MOST_LINKS,
    REQUEUE,
    STOP,
    Chain,
    Decision,
    Standing,
    decide,
    standing_of,
)
from megatron.jobs.next_job import await_ranks, can_requeue, persist, requeue, resubmit
from megatron.jobs.overrides import adapt, job_overrides
from megatron.log import get_logger
from megatron.mpu.topology import tasks_per_node
from megatron.neox_arguments import NeoXArgs
from megatron.signals import STOP_SIGNALS, raise_stop_requests

logger = get_logger(__name__)

_NAMED_RANK = re.compile(r"\bno progress for \d+ s: rank (\d+) of \d+ does not ")  # training/watchdog.py


@dataclass
class Job:
    """This SLURM job as a link of a chain. `folder`: of the run; `save`: where its checkpoints are."""

    id: str
    restart: int
    folder: Path
    save: str
    slurm: Slurm
    arguments: Sequence[str]
    env: Mapping[str, str]
    most: int = MOST_LINKS
    most_failures: int = MOST_FAILURES
    submit_command: str = "sbatch"

    def begin(self) -> Chain:
        """Note in `chain.json` that this link has begun.

        Raises `UserError` when it is the first link of a chain, and a link of another one trains: that goes on.
        """
        before = _number(self.env, "SLURM_JOB_CHAIN_COUNT", 0)
        chain = Chain.read(self.folder)
        busy = chain.last is not None and chain.last.ended is None and is_held(self.save)
        if busy and not chain.continues(self.id, self.restart):
            with SaveLock(self.save):  # waits for one that is ending
                chain = Chain.read(self.folder)
        chain = chain.begin(
            self.id, self.restart, time.time(), self.env.get("SLURM_JOB_NODELIST", ""), self.step, before
        )
        chain.write(self.folder)
        return chain

    @property
    def step(self) -> int:
        """Of the newest checkpoint; 0 without one."""
        return list_checkpoints(self.save).latest or 0

    def end(self, chain: Chain, end: JobEnd) -> None:
        """Decide whether another job follows, note that, and see to it. The last `chain:` line in the log says it."""
        link, step, code = chain.links[-1], self.step, end.code
        status = StatusFile(self.folder).read_own(link.started) or {}
        said = (status.get("reason") or end.reason or "")[:200] or None
        node = None if code in (0, StopRequested.exit_code) else failed_node(end.noted, str(said), self.env)
        chain = chain.end(ended=time.time(), code=code, step=step, failed_node=node, reason=said)
        chain.write(self.folder)  # now: SLURM may be about to end this process
        fields, standing = self._ask()
        if code == UserError.exit_code and link.count > 1 and is_held(self.save):
            # SLURM has given up a node whose ranks still write; their watchdog ends them. No input is wrong.
            code, said = LostRankError.exit_code, f"an earlier link still writes {self.save}: {said}"
        decision = decide(
            code,
            standing,
            progressed=step > link.step,
            in_a_row=chain.in_a_row,
            count=link.count,
            most=self.most,
            most_failures=self.most_failures,
            stop_asked=(self.folder / STOP).exists(),
            said=said,
        )
        chain = Chain(chain.links, decision.in_a_row, chain.excluded).end(reason=decision.reason)
        if node is not None:
            logger.info(f"chain: the rank that failed ran on node {node}")
        if standing is Standing.REQUEUED:
            chain.end(next=REQUEUE).write(self.folder)
            logger.info(f"chain: link {link.count} ended with code {code}; SLURM has requeued job {self.id}")
        elif decision.goes_on:
            self._continue(chain, fields, decision)
        else:
            chain.write(self.folder)
            logger.info(f"chain: no further job after link {link.count}, code {code}: {decision.reason}")

    def _ask(self) -> tuple[dict[str, str], Standing]:
        """SLURM's fields of this job, when none of its ranks run any more, and what they mean."""
        try:
            fields = await_ranks(self.slurm, self.id, self.restart)
            return fields, standing_of(fields, self.restart)
        except SlurmError as error:
            logger.error(f"{error}")
            return {}, Standing.RUNNING

    def _continue(self, chain: Chain, fields: Mapping[str, str], decision: Decision) -> None:
        """Requeue this job, or where that is not allowed submit its successor."""
        link, wanted = chain.links[-1], fields.get("ReqNodeList", "(null)")
        # A job that names its nodes would wait for ever without one of them.
        exclude = chain.failing_nodes() if wanted == "(null)" else ()
        chain = Chain(chain.links, chain.in_a_row, (*chain.excluded, *exclude))
        text = f"chain: link {link.count} of at most {self.most} ended with code {link.code} ({decision.reason})"
        text += f"; without {', '.join(exclude)} from now on" if exclude else ""
        failed: SlurmError | None = None
        # Before a requeue, after which SLURM ends this process; and what cannot be counted might never end.
        if not chain.end(next=REQUEUE).write(self.folder):
            limits = "MAX_JOB_CHAINS and MAX_JOB_FAILURES cannot be kept"
            logger.error(f"chain: no further job, because {self.folder / CHAIN} cannot be written, so that {limits}")
            return
        if can_requeue(fields) or not fields:
            logger.info(f"{text}: job {self.id} is requeued")
            try:
                persist(lambda: requeue(self.slurm, self.id, self.restart, fields, exclude))
                return
            except SlurmError as error:
                failed = error
                logger.warning(f"chain: job {self.id} cannot be requeued, so a new one is submitted: {error}")
        try:
            if not fields:
                raise failed or SlurmError("nothing is known about this job")
            env = {**self.env, "SLURM_JOB_CHAIN_COUNT": str(link.count), "DEEPY_HOME": str(HOME)}
            arguments = (self.arguments, self.folder, exclude, self.submit_command)
            successor = persist(lambda: resubmit(env, fields, *arguments))
            chain.end(next=successor).write(self.folder)
            logger.info(f"{text}: job {successor} follows when this one has ended")
        except (SlurmError, OSError) as error:
            chain.end(next=None, reason=f"{decision.reason}; {error}").write(self.folder)
            logger.error(f"chain: no further job, submit again to continue: {error}")


def failed_node(noted: Sequence[str], reason: str, env: Mapping[str, str]) -> str | None:
    """Where the rank ran that is to blame: as srun's lines say, else as the run's watchdog does in its `reason`."""
    for line in noted:
        node, _, how = line.removeprefix("srun: error: ").split(": ", 2)
        if not re.fullmatch(r"Exited with exit code [35]", how.strip()):  # those lost another rank, or were stopped
            return None if "[" in node else node
    named = _NAMED_RANK.search(reason)
    return node_of_rank(int(named[1]), env) if named else None


def node_of_rank(rank: int, env: Mapping[str, str]) -> str | None:
    """The node on which SLURM started a rank: in blocks, `SLURM_TASKS_PER_NODE` of them on each node."""
    try:
        nodes = expand_nodelist(env.get("SLURM_JOB_NODELIST", ""))
        counts = tasks_per_node(env.get("SLURM_TASKS_PER_NODE", ""))
    except UserError:
        return None
    placed = [node for node, count in zip(nodes, counts) for _ in range(count)]
    return placed[rank] if rank < len(placed) else None


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    """A variable that holds a number of 0 or more. Raises `UserError` for anything else in it."""
    text = env.get(name) or str(default)
    if not text.isdigit():
        raise UserError(f"{name}={text} is not a number of 0 or more")
    return int(text)


def with_end_time(env: Mapping[str, str], slurm: Slurm) -> dict[str, str]:
    """`env` with `SLURM_JOB_END_TIME`, which makes a run stop early enough and which not every SLURM sets."""
    if "SLURM_JOB_ID" not in env or end_of_job(env) is not None:
        return dict(env)
    try:
        end = time.mktime(time.strptime(slurm.job(env["SLURM_JOB_ID"]).get("EndTime", ""), "%Y-%m-%dT%H:%M:%S"))
    except (SlurmError, ValueError, OverflowError):  # no answer, or a job without a limit
        return dict(env)
    return {**env, "SLURM_JOB_END_TIME": str(int(end))}


def finished(chain: Chain, folder: Path) -> bool:
    """Whether the run had finished when SLURM requeued its job: in the moments after its end."""
    if len(chain.links) < 2 or chain.links[-1].count < 2:
        return False
    before, status = chain.links[-2], StatusFile(folder).read() or {}
    if before.code is not None:
        return before.code == 0
    return status.get("state") == "ended" and status.get("exit_code") == 0 and status["heartbeat"] >= before.started


def run(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Train with these arguments of the job; returns the exit code of the run."""
    line = parse_launcher_command_line([str(HOME / "train.py"), *arguments])
    profile, slurm = find_profile(env), Slurm()
    if "SLURM_JOB_ID" not in env or line.dry_run or line.prepare or line.explain:
        return _train([*arguments, *job_overrides(line.paths, line.overrides, profile, env)], env).code
    adapted = adapt(line.paths, line.overrides, profile, env).overrides
    job = _job(
        NeoXArgs.from_files(line.paths, [*line.overrides, *adapted]), arguments, env, slurm, profile.submit_command
    )
    chain = job.begin() if job else Chain()
    if job and (code := _refuse(chain, job)) is not None:
        return code
    count = chain.last.count - 1 if chain.last else 0
    try:
        preflight.check(profile, env)
        adapted = job_overrides(line.paths, line.overrides, profile, env, first_job=chain.first_job)
        env = {**with_end_time(env, slurm), "SLURM_JOB_CHAIN_COUNT": str(count)}
        with _guard(job, chain, env):
            end = _train([*arguments, *adapted], env)
    except DeepyError as error:  # before the run had begun
        if not isinstance(error, StopRequested):
            logger.error(f"error: {error}")
        end = JobEnd(error.exit_code, str(error))
    for number in STOP_SIGNALS:  # SLURM sends one when it requeues the job; the commands that follow inherit that
        signal.signal(number, signal.SIG_IGN)
    if job:
        job.end(chain, end)
    return end.code


def _job(
    args: NeoXArgs, arguments: Sequence[str], env: Mapping[str, str], slurm: Slurm, submit_command: str
) -> Job | None:
    """This job as a link; None when it is to stay the only one, or when its run saves nothing that could continue."""
    most = _number(env, "MAX_JOB_CHAINS", MOST_LINKS)
    if most == 0:
        return None
    folder, save = run_folder(args), args.checkpoint.save
    if folder is None or save is None:
        logger.info("chain: `save` is not set, so no job follows this one")
        return None
    failures = max(1, _number(env, "MAX_JOB_FAILURES", MOST_FAILURES))
    restart = slurm_job()["restart"]
    return Job(env["SLURM_JOB_ID"], restart, folder, save, slurm, arguments, env, most, failures, submit_command)


@contextlib.contextmanager
def _guard(job: Job | None, chain: Chain, env: Mapping[str, str]) -> Iterator[None]:
    """While the run lasts: when SLURM ends it at its time limit, because it hangs or saves for too long, another job
    follows all the same. SLURM leaves the seconds of `KillWait` for that."""
    until, over = end_of_job(env), threading.Event()
    if job is None or until is None:
        yield
        return

    def watch() -> None:
        over.wait(max(0.0, until - time.time()))
        while not over.wait(1.0):  # SLURM looks at limits every half minute, and may grant minutes
            with contextlib.suppress(SlurmError):
                if standing_of(job.slurm.job(job.id), job.restart) is Standing.TIME_LIMIT:
                    job.end(chain, JobEnd(LostRankError.exit_code, "SLURM ends the run at its time limit"))
                    return

    thread = threading.Thread(target=watch, name="time-limit", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _refuse(chain: Chain, job: Job) -> int | None:
    """The exit code of a job that has nothing to do: the run had finished, or SLURM requeued it too often, or although
    the user wants no further link."""
    link, code, reason = chain.links[-1], None, ""
    if finished(chain, job.folder):
        code, reason = 0, "the run had finished before SLURM requeued the job"
    elif link.count > job.most:
        code = StopRequested.exit_code
        reason = f"this would be link {link.count} of at most {job.most} (MAX_JOB_CHAINS); submit again to continue"
    elif link.count > 1 and (job.folder / STOP).exists():
        code = StopRequested.exit_code
        reason = f"the file {job.folder / STOP} asks for no further job: remove it and submit again to continue"
    if code is not None:
        chain.end(ended=time.time(), code=code, reason=reason).write(job.folder)
        logger.info(f"chain: {reason}")
    elif (job.folder / STOP).exists():
        logger.warning(f"chain: {job.folder / STOP} is there, so no job follows this one")
    return code


def _train(arguments: Sequence[str], env: Mapping[str, str]) -> JobEnd:
    command = [sys.executable, "-u", str(HOME / "deepy.py"), str(HOME / "train.py"), *arguments, "launcher=slurm"]
    return run_local(LocalJob(command, [env], name="deepy.py", noted_line=SRUN_TASK_LINE))


def main() -> int:
    raise_stop_requests()
    log.configure(level=os.environ.get("LOGLEVEL", "INFO"))
    return run(sys.argv[1:], os.environ)


if __name__ == "__main__":
    run_cli(main, is_run=True)
