"""A run over several SLURM jobs: whether another one follows, and `chain.json`, in which its jobs are noted.

A link is one start of a job; a job that is requeued keeps its number and is the next link. Nothing here asks SLURM.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from megatron.errors import (
    INTERRUPTED,
    LostRankError,
    MachineError,
    NumericsError,
    StopRequested,
    UserError,
)
from megatron.files import read_json, write_atomically
from megatron.log import get_logger

logger = get_logger(__name__)

CHAIN, STOP = "chain.json", "STOP"
VERSION = 1
REQUEUE = "requeue"
MOST_LINKS, MOST_FAILURES = 30, 3

# How a run ended that no further job helps, and what to do.
_FINAL = {
    0: "the run is finished",
    UserError.exit_code: "the input is wrong: correct it and submit again",
    NumericsError.exit_code: "the numbers went bad: look at them before you submit again",
    MachineError.exit_code: "the disk is full, or another limit of the machine: make room and submit again",
    INTERRUPTED: "ended at once by a second Ctrl-C",
}


class Standing(Enum):
    """What SLURM says of a job whose run has just ended."""

    RUNNING = "running"
    TIME_LIMIT = "at its time limit"
    PREEMPTED = "preempted"
    LOST_NODE = "a node failed"
    REQUEUED = "requeued by SLURM"
    CANCELLED = "cancelled"


def standing_of(job: Mapping[str, str], restart: int) -> Standing:
    """The standing of a job by its fields in `scontrol show job`; `restart`: how often it had been when it began.

    While its processes end, SLURM says COMPLETING whatever the cause, so that the other fields have to tell.
    """
    state, reason = job.get("JobState", ""), job.get("Reason", "")
    if int(job.get("Restarts") or 0) > restart:
        return Standing.REQUEUED
    if state == "TIMEOUT" or (state == "COMPLETING" and reason == "TimeLimit"):
        return Standing.TIME_LIMIT
    if state == "PREEMPTED" or job.get("PreemptTime", "None") not in ("None", "Unknown", "N/A"):
        return Standing.PREEMPTED
    if state == "NODE_FAIL" or reason == "NodeDown":
        return Standing.LOST_NODE
    return Standing.RUNNING if state in ("RUNNING", "SUSPENDED") else Standing.CANCELLED


@dataclass(frozen=True)
class Link:
    """One start of a job.

    Attributes:
        job_id, restart: the job, and how often SLURM had requeued it.
        count: the number of this link in its chain, from 1.
        started, ended: seconds since 1970; `ended` None while it runs, and when nothing of it was left to note that.
        code: the exit code of the run; None likewise.
        nodes: SLURM's list of them.
        step: of the newest checkpoint: when it started, then when it ended.
        failed_node: where the rank ran that is to blame for a failure, as far as that is known.
        reason: why it ended.
        next: what follows: `requeue`, the number of another job, or None.
    """

    job_id: str
    restart: int
    count: int
    started: float
    ended: float | None = None
    code: int | None = None
    nodes: str = ""
    step: int = 0
    failed_node: str | None = None
    reason: str | None = None
    next: str | None = None

    def follows(self, before: Link) -> bool:
        """Whether this is a link of the same chain as the one that was noted before it."""
        return self.count == before.count + 1 and self.job_id in (before.job_id, before.next)


@dataclass(frozen=True)
class Chain:
    """The content of `chain.json`.

    Attributes:
        links: of the newest chain and of those before it in this run folder, oldest first.
        in_a_row: how many links ended, the last ones, without a newer checkpoint or by a failure.
        excluded: nodes that this chain avoids.
    """

    links: tuple[Link, ...] = ()
    in_a_row: int = 0
    excluded: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Chain:
        """The chain of a run folder; an empty one when there is none, or when its file is damaged (which is logged)."""
        path = folder / CHAIN
        try:
            content = read_json(path)
            known = {one.name for one in fields(Link)}
            links = tuple(Link(**{k: v for k, v in link.items() if k in known}) for link in content["links"])
            return cls(links, int(content["in_a_row"]), tuple(map(str, content["excluded"])))
        except (FileNotFoundError, NotADirectoryError):
            return cls()
        except (UserError, AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning(f"{path} cannot be used, so this job is the first of a new chain: {error}")
            return cls()

    def write(self, folder: Path) -> bool:
        """Replace `chain.json`; returns whether that went well. A run does not end because it fails."""
        content = {"version": VERSION, **asdict(self)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / CHAIN, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            logger.warning(f"{folder / CHAIN} cannot be written: {error}")
            return False
        return True

    @property
    def last(self) -> Link | None:
        return self.links[-1] if self.links else None

    @property
    def newest(self) -> tuple[Link, ...]:
        """The links of the newest chain, as far as they are known: the first may have another `count` than 1."""
        begin = len(self.links) - 1
        while begin > 0 and self.links[begin].follows(self.links[begin - 1]):
            begin -= 1
        return self.links[max(begin, 0) :]

    @property
    def first_job(self) -> str | None:
        """The number of the job that began the newest chain."""
        return self.newest[0].job_id if self.links else None

    def continues(self, job_id: str, restart: int) -> bool:
        """Whether the job, restarted that often, is the next link of the newest chain."""
        last = self.last
        return last is not None and (last.next == job_id or (last.job_id == job_id and restart > last.restart))

    def begin(self, job_id: str, restart: int, now: float, nodes: str, step: int, before: int = 0) -> Chain:
        """This chain with a new link, or a new chain after it, before which there were `before` links of other jobs.

        A job that was requeued and begins a chain had links too: `chain.json` does not survive, as on a disk of a node.
        Each of them has failed when there is no checkpoint.
        """
        last = self.last
        if last is None or not self.continues(job_id, restart):
            link = Link(job_id, restart, max(before, restart) + 1, now, nodes=nodes, step=step)
            return Chain((*self.links, link), in_a_row=0 if step else restart)
        links, in_a_row = self.links, self.in_a_row
        if (
            last.next is None
        ):  # its end was not noted, or not what follows: SLURM requeued it, preempted or without a node
            in_a_row = 0 if step > last.step else in_a_row
            last = replace(last, step=step, reason=last.reason or Standing.REQUEUED.value, next=REQUEUE)
            links = (*links[:-1], last)
        link = Link(job_id, restart, last.count + 1, now, nodes=nodes, step=step)
        return replace(self, links=(*links, link), in_a_row=in_a_row)

    def end(self, **facts: Any) -> Chain:
        """This chain with facts of its last link replaced."""
        return replace(self, links=(*self.links[:-1], replace(self.links[-1], **facts)))

    def failing_nodes(self) -> tuple[str, ...]:
        """Nodes that failed twice in the newest chain and are not excluded yet."""
        failed = Counter(link.failed_node for link in self.newest if link.failed_node)
        return tuple(node for node, times in failed.items() if times > 1 and node not in self.excluded)


@dataclass(frozen=True)
class Decision:
    """Whether another link follows (`goes_on`), why, and how many links have now failed in a row."""

    goes_on: bool
    reason: str
    in_a_row: int = 0


def decide(
    code: int,
    standing: Standing,
    *,
    progressed: bool,
    in_a_row: int,
    count: int,
    most: int = MOST_LINKS,
    most_failures: int = MOST_FAILURES,
    stop_asked: bool = False,
    said: str | None = None,
) -> Decision:
    """Whether another job follows one whose run ended with `code`.

    Args:
        standing: of the job.
        progressed: this link has written a checkpoint.
        in_a_row: links before this one that failed in a row.
        count: the number of this link in its chain.
        most: links of a chain.
        most_failures: links that may fail in a row, or end without a newer checkpoint.
        stop_asked: the user has put the file `STOP` into the run folder.
        said: why the run says it ended (`status.json`).
    """
    if code in _FINAL:
        return Decision(False, _FINAL[code])
    if standing is Standing.CANCELLED:
        return Decision(False, "the job was cancelled")
    stopped = code == StopRequested.exit_code
    if stopped:
        why = said or "stopped with everything saved"
        why += "" if standing is Standing.RUNNING else f", the job is {standing.value}"
        excused = standing in (Standing.PREEMPTED, Standing.LOST_NODE)
        failures = 0 if progressed else in_a_row + (not excused)
    else:
        why = "a rank was lost" if code == LostRankError.exit_code else "the run failed"
        why += f": {said}" if said else ""
        failures = 1 if progressed else in_a_row + 1
    if stop_asked:
        return Decision(False, f"{why}; the file {STOP} in the run folder asks for no further job", failures)
    if failures >= most_failures:
        what = "ended without a newer checkpoint" if stopped else "failed, without a newer checkpoint in between"
        text = f"{why}; {failures} jobs in a row {what}: find out why before you submit again"
        return Decision(False, text, failures)
    if count >= most:
        return Decision(False, f"{why}; this was link {count} of at most {most} (MAX_JOB_CHAINS)", failures)
    return Decision(True, why, failures)
