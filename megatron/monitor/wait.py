"""`--wait-iterations`: return when a job has really trained so many iterations, or when it never will.

Exit codes, besides 2 for wrong input:

| 0   | it has trained that many iterations, and the last of them are finite |
| 1   | it failed, or hangs |
| 3   | it ended before, without a failure: done, stopped on request, or cancelled |
| 4   | it can never start as it is |
| 6   | SLURM could not be asked for two minutes, and nothing else knows the job |
| 124 | `--timeout` passed |
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.errors import MachineError, UserError
from megatron.monitor.judge import CLOCK_SECONDS
from megatron.monitor.rows import Row
from megatron.monitor.slurm_jobs import ENDED as ENDED_STATES

REACHED, FAILED, ENDED, NEVER_STARTS, UNREACHABLE, TIMED_OUT = 0, 1, 3, 4, MachineError.exit_code, 124
REACH_SECONDS = 120.0  # for which SLURM may give no answer from the first look on: a controller is restarted in less
# A run that failed may be started again: by its job, which takes a while to say so, or by SLURM.
SETTLE_SECONDS, SETTLE_SECONDS_OF_SLURM = 30.0, 5.0
_NEVER = ("dependency_never_satisfied", "cannot_start", "held")
_BAD = ("nan", "crashed", "out_of_memory", "stale", "lost", "repeated_failures")


@dataclass
class Waiting:
    """What one wait remembers: where the job began first, since a restart begins at a checkpoint after that.

    Attributes:
        wanted: iterations to be trained.
        settle: seconds for which an end must stand while its job runs, since another start may follow.
    """

    wanted: int
    settle: float = SETTLE_SECONDS
    first: int | None = None
    _ended: float | None = field(default=None, init=False)

    def check(self, rows: list[Row], what: str, now: float) -> tuple[int, str] | None:
        """The exit code and why, or None to continue waiting.

        Raises `UserError` when there is nothing to wait for.
        """
        if not rows:
            raise UserError(f"{what}: no such job or run is known here")
        if len(rows) > 1:
            raise UserError(f"{what}: {len(rows)} runs are there; name one: {', '.join(map(_name, rows))}")
        (row,) = rows
        if row.start_iteration is not None:
            self.first = row.start_iteration if self.first is None else min(self.first, row.start_iteration)
        trained = self._trained(row)
        kinds = {one.kind for one in row.problems}
        if trained >= self.wanted and row.action != "escalate":
            return REACHED, f"{_name(row)} has trained {trained} iterations (it is at {row.iteration})"
        if kinds & set(_NEVER):
            return NEVER_STARTS, f"{_name(row)}: {row.action_reason}"
        over = row.state in ("done", "stopped", "failed", "unknown") or (
            bool(kinds & set(_BAD)) and row.action != "wait"
        )
        if not over:
            self._ended = None
            return None
        if self._ended is None:
            self._ended = now
        if row.action == "wait" or now - self._ended < self._settle(row):
            return None
        bad = row.state == "failed" or kinds & set(_BAD) or row.action == "escalate"
        reason = f"{_name(row)} has trained {trained} of {self.wanted} iterations: {row.state}, {row.action_reason}"
        return (FAILED if bad else ENDED), reason

    def _trained(self, row: Row) -> int:
        if row.iteration is None or self.first is None or row.start_iteration is None:
            return 0  # nothing that this job has written
        return row.iteration - self.first

    def _settle(self, row: Row) -> float:
        """Seconds for which this end must stand."""
        if row.job_state is None or row.job_state == "CANCELLED" or row.action not in ("retry", "fix"):
            return 0.0
        return min(self.settle, SETTLE_SECONDS_OF_SLURM) if row.job_state in ENDED_STATES else self.settle


def await_iterations(
    look: Callable[[], tuple[list[Row], list[str]]],
    what: str,
    waiting: Waiting,
    *,
    timeout: float | None,
    interval: float,
    tell: Callable[[str], None],
    reach: float = REACH_SECONDS,
) -> tuple[int, str]:
    """Look every `interval` seconds until there is a code, and `tell` what is waited for whenever that changes.

    `look` gives the rows, and what could not be asked; `reach`: seconds in which SLURM must have answered once.
    """
    began = time.monotonic()
    deadline = None if timeout is None else began + timeout
    missing, known = 0.0, False
    told: dict[str, str] = {}  # what was said last of the job, and of each thing that could not be asked
    tell(f"{what}: waiting until it has trained {waiting.wanted} iterations, a look every {interval:g} s")
    while True:
        rows, notes = look()
        now = time.monotonic()
        for note in notes:
            if note not in told:
                tell(f"{what}: SLURM could not be asked, trying again: {note}")
        told = {**{key: line for key, line in told.items() if key == what}, **dict.fromkeys(notes, "")}
        known = known or bool(rows)
        # A controller that does not answer, or does not know its newest job yet, is no answer.
        if not rows and notes:
            if not known and now - began >= reach:
                return UNREACHABLE, f"{what}: nothing is known of it: no answer of SLURM in {reach:g} s: {notes[0]}"
        elif not rows and missing < min(CLOCK_SECONDS / 6, interval * 3):
            missing += interval
        else:
            answer = waiting.check(rows, what, now)
            if answer is not None:
                return answer
            state = f"{rows[0].state}" + (f" ({rows[0].job_reason})" if rows[0].state == "pending" else "")
            if told.get(what) != state:
                told[what] = state
                tell(f"{what}: {state}{_place(rows[0])}")
        if deadline is not None and now >= deadline:
            state = f"{rows[0].state}, iteration {rows[0].iteration}" if rows else "nothing is known"
            return TIMED_OUT, f"{what}: not within {timeout:g} s ({state}{'; ' + notes[0] if notes else ''})"
        time.sleep(interval if deadline is None else max(0.0, min(interval, deadline - now)))


def _place(row: Row) -> str:
    return "" if row.iteration is None or row.state == "pending" else f", iteration {row.iteration}"


def _name(row: Row) -> str:
    return f"job {row.job_id}" if row.job_state is not None else str(row.run_folder)
