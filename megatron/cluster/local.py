"""The local process manager: starts this node's ranks, passes signals on, ends the job when one rank fails.

A rank that fails ends the job: its peers get `settle` seconds to fail by themselves (their last words are worth
having), then SIGTERM, then after `grace` seconds SIGKILL. Its last output is shown last. A stop signal (Ctrl-C,
SIGTERM, a closed terminal, ...) reaches the ranks once, and the job then takes the time it needs to save; a second
Ctrl-C ends it at once, and so do `patience` seconds in which the ranks give no sign of life.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from megatron.cluster.rank_output import RankOutput, open_channel
from megatron.errors import INTERRUPTED, LostRankError, MachineError, NumericsError, StopRequested, UserError
from megatron.log import RANK_LOG, get_logger
from megatron.signals import DUMP_SIGNAL, handle_stop_signals, name_signal

logger = get_logger(__name__)

_ERRORS = (UserError, StopRequested, NumericsError, LostRankError, MachineError)
_TABLE = {0, 1, *(error.exit_code for error in _ERRORS)}
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class LocalJob:
    """Ranks to start on this node. `environments[i]` is the whole environment of local rank i."""

    command: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    first_rank: int = 0
    world_size: int | None = None
    log_folder: Path | None = None
    name: str | None = None
    """What the one process is when it is no rank but another launcher, for the report."""
    stop_signal: int | None = None
    """What a stop signal becomes for another launcher (srun and mpirun kill on SIGTERM, but pass SIGUSR1 on); None:
    it reaches the ranks as it came."""
    stopped_code: int | None = None
    """The exit code, besides 3, with which another launcher answers `stop_signal`."""
    failure_signal: int | None = None
    """What ends another launcher that keeps waiting `settle` seconds after a failure; None: `stop_signal`."""
    failure_line: re.Pattern[bytes] | None = None
    """A line in which another launcher reports a failure although it keeps waiting; group 1 is the exit code."""
    noted_line: re.Pattern[bytes] | None = None
    """Lines of the output that `JobEnd.noted` is to hold."""
    settle: float = 1.0
    grace: float = 4.0
    launcher_fd: int | None = None
    """A pipe whose other end belongs to whoever started us remotely: when that closes, the ranks are asked to stop."""
    patience: float = math.inf
    """Seconds without a sign of life after which ranks that were asked to stop are killed."""
    sign_of_life: Path | None = None
    """A file that the ranks replace every few seconds while they make progress (`status.json`)."""


@dataclass
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    output: RankOutput
    code: int | None = None
    ended: float = 0.0


@dataclass
class _Run:
    """The state of a running job."""

    job: LocalJob
    ranks: list[_Rank] = field(default_factory=list)
    started: bool = False
    received: list[int] = field(default_factory=list)
    passed_on: list[int] = field(default_factory=list)
    interrupts: int = 0
    failures: list[_Rank] = field(default_factory=list)
    terminated: float | None = None
    killed: bool = False
    abandoned: bool = False
    last_sign: float = 0.0  # of life, or of the request to stop
    last_change: int | None = None  # of the file that shows it
    hung: float | None = None  # when the ranks were found to be
    cut_short: JobEnd | None = None  # why we killed a job that had been asked to stop


def rank_environment(
    base: Mapping[str, str],
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    master_addr: str,
    master_port: int,
    cores: int,
    gpus: int,
    devices: Sequence[int] | None = None,
) -> dict[str, str]:
    """The environment of one rank. `devices`: which of the visible GPUs the job may use, by number (None: all)."""
    env = {
        **base,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // local_world_size)))
    env.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in native code leaves a stack in the log
    if gpus == 0:
        env.setdefault("DS_ACCELERATOR", "cpu")
    elif devices is not None:
        visible = [name for name in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if i < len(visible) else str(i) for i in devices)
    return env


class JobEnd(NamedTuple):
    """How a job ended: its exit code (table in `megatron/errors.py`) and, unless it is done, why.

    `known_best`: the kernel ended the rank to blame, so the run cannot know better. `noted`: the first lines that
    matched the job's `noted_line`.
    """

    code: int
    reason: str | None = None
    known_best: bool = False
    noted: tuple[str, ...] = ()


def run_local(job: LocalJob) -> JobEnd:
    """Start the ranks, wait for them, and return how the job ended."""
    run = _Run(job)
    with _signals_to(run):
        try:
            _start(run)
            _watch(run)
        finally:
            _kill_all(run)  # only after a fault of ours: normally nobody is left
    noted = [line for rank in run.ranks for line in rank.output.noted]
    return _conclude(run)._replace(noted=tuple(noted))


def _start(run: _Run) -> None:
    dies_with_us = end_with_parent(run.job.stop_signal or signal.SIGTERM)
    for index, env in enumerate(run.job.environments):
        rank = run.job.first_rank + index
        read_fd, write_fd = open_channel(terminal=rank == 0)
        folder = run.job.log_folder
        log_file = folder / f"rank_{rank}.log" if folder else None
        # A session of its own: Ctrl-C in the terminal reaches only us, and killing a rank takes its workers along.
        process = subprocess.Popen(
            run.job.command,
            env={**env, RANK_LOG: str(log_file) if rank == 0 and log_file else ""},
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=None if rank == 0 else write_fd,
            stderr=write_fd,
            start_new_session=True,
            preexec_fn=dies_with_us,
        )
        os.close(write_fd)
        lines = {"failure_line": run.job.failure_line, "noted_line": run.job.noted_line}
        output = RankOutput(rank, read_fd, straight=rank == 0, log_file=log_file, **lines)
        run.ranks.append(_Rank(rank, process, output))
    run.started = True
    for number in run.passed_on:  # signals that came in between
        _send(run, number)


def end_with_parent(number: int) -> Callable[[], None] | None:
    """For `preexec_fn`: the kernel sends this signal to the rank if we die without a word (Linux only)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, number)

    return set_death_signal


def _watch(run: _Run) -> None:
    """Until every rank has ended: pass output on, collect exits, end the job after a failure."""
    selector = selectors.DefaultSelector()
    for rank in run.ranks:
        selector.register(rank.output.read_fd, selectors.EVENT_READ, rank.output)
    launcher = _poll_closed(run.job.launcher_fd)
    while any(rank.code is None for rank in run.ranks):
        _pump(selector, timeout=0.1)
        _reap(run)
        if not run.abandoned and launcher():
            run.abandoned = True
            _stop(run, signal.SIGTERM)
        _escalate(run)
    deadline = time.monotonic() + 1.0  # a grandchild may keep a pipe open: do not wait for it for ever
    while selector.get_map() and time.monotonic() < deadline:
        _pump(selector, timeout=0.1)
    for rank in run.ranks:
        if rank.output.read_fd >= 0:
            rank.output.close()
    selector.close()


def _pump(selector: selectors.BaseSelector, timeout: float) -> None:
    if not selector.get_map():
        time.sleep(timeout)
        return
    for key, _ in selector.select(timeout):
        if not key.data.pump():
            selector.unregister(key.fd)


def _poll_closed(fd: int | None) -> Callable[[], bool]:
    """A function that returns whether the reader of pipe `fd` has gone (never, without a pipe)."""
    if fd is None:
        return lambda: False
    poller = select.poll()
    poller.register(fd, 0)  # errors and hang-ups are always reported
    return lambda: any(event & (select.POLLERR | select.POLLHUP) for _, event in poller.poll(0))


def _reap(run: _Run) -> None:
    """Note the ranks that have ended. What a failed rank started dies with it."""
    for rank in run.ranks:
        if rank.code is not None:
            continue
        if rank.output.reported is not None and rank not in run.failures and not _is_fine(run, rank.output.reported):
            rank.ended = time.monotonic()
            run.failures.append(rank)
        # Look without reaping: until then the group id cannot belong to anybody else.
        status = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            continue
        if status.si_status != 0:
            _signal_group(rank, signal.SIGKILL)
        rank.code, rank.ended = rank.process.wait(), time.monotonic()
        if run.terminated is None and rank not in run.failures and not _is_fine(run, rank.code):
            run.failures.append(rank)


def _is_fine(run: _Run, code: int) -> bool:
    """Done, stopped with everything saved, or ended by a signal that we passed on."""
    if run.passed_on and code == run.job.stopped_code:
        return True
    return code in (0, StopRequested.exit_code) or any(code in (-number, 128 + number) for number in run.passed_on)


def _escalate(run: _Run) -> None:
    now = time.monotonic()
    if run.passed_on and not run.killed:
        _end_stop(run, now)
    if not run.failures:
        return
    if run.terminated is None and now - run.failures[0].ended >= run.job.settle:
        run.terminated = now
        if _code(run.failures[0]) == LostRankError.exit_code:
            _dump_stacks(run)
        _send(run, run.job.failure_signal or run.job.stop_signal or signal.SIGTERM)
    elif run.terminated is not None and not run.killed and now - run.terminated >= run.job.grace:
        _kill_all(run)


def _end_stop(run: _Run, now: float) -> None:
    """Kill ranks that were asked to stop: at a second Ctrl-C, or when they give no sign of life."""
    if run.interrupts > 1:
        last = "ended at once by a second Ctrl-C, which waits for no checkpoint"
        run.cut_short = JobEnd(INTERRUPTED, last)
    elif run.hung is not None:
        if now - run.hung < 1.0:  # the stacks are being written
            return
    elif now - _last_sign(run, now) < run.job.patience:
        return
    elif run.terminated is None:
        running = [f"rank {rank.rank}{_state(rank)}" for rank in run.ranks if rank.code is None]
        asked = name_signal(run.received[0])
        waited = f"no sign of life for {run.job.patience:g} s since {asked}: killed {', '.join(running)}"
        run.hung, run.cut_short = now, JobEnd(LostRankError.exit_code, waited)
        logger.error(run.cut_short.reason)
        _dump_stacks(run)
        return
    run.passed_on.append(signal.SIGKILL)
    _kill_all(run)


def _last_sign(run: _Run, now: float) -> float:
    """When the ranks last showed that they make progress; at first the time of the request to stop."""
    change = None
    if run.job.sign_of_life is not None:
        with contextlib.suppress(OSError):
            change = run.job.sign_of_life.stat().st_mtime_ns
    if not run.last_sign or change != run.last_change:
        run.last_sign, run.last_change = now, change
    return run.last_sign


def _state(rank: _Rank) -> str:
    """ " (stopped)" for a process that got SIGSTOP, else nothing."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{rank.process.pid}/stat").read_text()
        return " (stopped)" if stat.rpartition(")")[2].split()[0] in "Tt" else ""
    return ""


def _dump_stacks(run: _Run) -> None:
    """Ranks write their Python stacks to their log, those that were stopped (SIGSTOP) included."""
    if run.job.name is None:
        _send(run, DUMP_SIGNAL)
        _send(run, signal.SIGCONT)


def _kill_all(run: _Run) -> None:
    run.killed = True
    _send(run, signal.SIGKILL)


def _send(run: _Run, number: int) -> None:
    """Send a signal to the ranks still running: SIGKILL to all that a rank started, others to the rank itself."""
    for rank in run.ranks:
        if rank.code is None:
            if number == signal.SIGKILL:
                _signal_group(rank, number)
            else:
                os.kill(rank.process.pid, number)  # not send_signal: that would reap


def _signal_group(rank: _Rank, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.process.pid, number)


def _stop(run: _Run, number: int) -> None:
    """Signal `number` reached us: pass it on, translated, unless the ranks have had one."""
    run.received.append(number)
    if not run.passed_on:
        run.passed_on.append(run.job.stop_signal or number)
        if run.started:
            _send(run, run.passed_on[0])


@contextlib.contextmanager
def _signals_to(run: _Run) -> Iterator[None]:
    """While the job runs, the wish to stop goes to the ranks: once, whatever it came as."""

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            run.interrupts += 1
        if not run.received:
            again = " (Ctrl-C again: end it now)" if number == signal.SIGINT else ""
            logger.info(f"{name_signal(number)}: asked the ranks to stop{again}")
        _stop(run, number)

    previous = handle_stop_signals(handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _conclude(run: _Run) -> JobEnd:
    """How the job ended; after a failure also the report, ending with the last words of the rank to blame."""
    codes = [rank.code for rank in run.ranks]
    if not run.failures or run.hung is not None:
        return _conclude_stop(run, codes)
    culprit = min(run.failures, key=lambda rank: (_blame(_code(rank)), rank.ended))
    code = _code(culprit)
    if code == LostRankError.exit_code and (StopRequested.exit_code in codes or _ended_at_once(run)):
        return _conclude_stop(run, codes)  # one stopped before the signal reached the others, which lost it
    return JobEnd(exit_code(code), _report(run, culprit), known_best=code < 0)


def _conclude_stop(run: _Run, codes: list[int | None]) -> JobEnd:
    """The end of a job of which no rank failed."""
    if run.cut_short is not None:
        return run.cut_short
    if all(code == 0 for code in codes):
        return JobEnd(0)
    if run.job.name is not None and StopRequested.exit_code not in codes:
        return JobEnd(128 + run.received[0])  # of another launcher, which says nothing about the ranks
    if (number := _ended_at_once(run)) is not None:
        lost = "what was trained since the last checkpoint is lost"
        return JobEnd(128 + number, f"ended at once by {name_signal(number)}: {lost}")
    # A rank that the signal itself ended had no handler yet: it was starting, with nothing to save.
    name = f"by {name_signal(run.received[0])}" if run.received else "on request"
    return JobEnd(StopRequested.exit_code, f"stopped {name}")


def _ended_at_once(run: _Run) -> int | None:
    """The signal that we passed on with which a rank that saves nothing at a signal says that it ended."""
    codes = {rank.code for rank in run.ranks}
    return next((number for number in run.passed_on if 128 + number in codes), None)


def _code(rank: _Rank) -> int:
    """The exit code to judge a rank by: what another launcher reported counts more than how that launcher ended."""
    return rank.output.reported or rank.code or 0


def exit_code(code: int) -> int:
    """A rank's return code in terms of the table: a signal is a lost rank, a number of its own is 1.

    Other launchers and shells write signal N as 128 + N.
    """
    if code < 0 or code - 128 in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        return LostRankError.exit_code
    return code if code in _TABLE else 1


def _blame(code: int) -> int:
    """Smaller = likelier the cause: a considered verdict, then crashes in order of time, then `a peer is gone`."""
    if code in (UserError.exit_code, NumericsError.exit_code):
        return 0
    return 2 if code == LostRankError.exit_code else 1


def _report(run: _Run, culprit: _Rank) -> str:
    """Log which rank failed, how, and its last output; returns the first two."""
    code = _code(culprit)
    how = f"exit code {code}"
    if code < 0:
        how = f"killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (often: out of memory, see dmesg)"
    world = run.job.world_size or len(run.ranks)
    where = f"; logs: {run.job.log_folder}/" if run.job.log_folder else ""
    shown_last = culprit.output.straight and all(r.output.last_write <= culprit.output.last_write for r in run.ranks)
    tail = "" if shown_last else culprit.output.tail()
    who = run.job.name or f"rank {culprit.rank} of {world}"
    reason = f"{who} lost another rank" if code == LostRankError.exit_code else f"{who} failed: {how}"
    head = f"{reason}{where}"
    logger.error(f"{head}\n{tail}" if tail else head)
    return reason
