"""SLURM's jobs as the monitor sees them: `squeue` for those that wait or run, `sacct` for those that have ended."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.cluster.slurm import Slurm, SlurmError, count_gpus

ENDED = {
    *("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"),
    *("DEADLINE", "REVOKED"),
}


@dataclass(frozen=True)
class Job:
    """One job, in its newest start.

    Attributes:
        job_id: as users write it; `raw_id`: SLURM_JOB_ID, another one for a task of an array.
        state: SLURM's word, such as RUNNING; `reason`: why it waits.
        start, end: seconds since 1970, None when not known.
        restarts: how often SLURM has requeued it.
        output: the log; None when SLURM does not say.
        had_nodes: whether SLURM has given it nodes in this start.
    """

    job_id: str
    raw_id: str
    name: str
    user: str
    partition: str
    state: str
    reason: str = ""
    nodes: int = 0
    gpus: int = 0
    start: float | None = None
    end: float | None = None
    exit_code: str = ""
    restarts: int = 0
    work_dir: str = ""
    output: str | None = None
    had_nodes: bool = True

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def was_refused(self) -> bool:
        """Whether `sbatch` has refused it: it failed and had no nodes."""
        return self.state == "FAILED" and not self.had_nodes

    def logs(self, folder: str | None) -> list[Path]:
        """Where its log may be: where SLURM says, else under the usual names in the folder of logs or its own."""
        if self.output:
            return [Path(self.output)]
        names = (f"{self.name}-{self.job_id}.out", f"slurm-{self.job_id.replace('_', '-')}.out")
        places = [folder, f"{folder}/{self.name}"] if folder else []
        return [Path(place, name) for place in (*places, self.work_dir) if place for name in names]


def read_jobs(slurm: Slurm, user: str | None, ids: Sequence[str], days: int, notes: list[str]) -> list[Job]:
    """The jobs of `user` (None: of all), or those of `ids` whosever they are; ended ones of the last `days`.

    Raises `SlurmError` when SLURM does not answer. Accounting may be missing: then the controller's memory has to do,
    and an accounting that does not answer is one of the `notes`.
    """
    who = () if ids or user is None else (f"--user={user}",)
    jobs: dict[str, Job] = {}
    since = f"--starttime=now-{days}days"
    which = (f"--jobs={','.join(ids)}", since) if ids else (since, *(who or ("--allusers",)))
    try:
        for row in slurm.accounting("--duplicates", *which):
            before = jobs.get(row["JobIDRaw"])
            jobs[row["JobIDRaw"]] = _accounted(row, 0 if before is None else before.restarts + 1)
    except SlurmError as error:
        if "accounting storage is disabled" not in str(error):
            notes.append(str(error))
    for row in slurm.queue("--states=all", *who):
        if not ids or row["job_id"] in ids or row["raw_id"] in ids or row["job_id"].partition("_")[0] in ids:
            jobs[row["raw_id"]] = _queued(row, jobs.get(row["raw_id"]))
    return list(jobs.values())


def _accounted(row: dict[str, str], restarts: int) -> Job:
    return Job(
        row["JobID"],
        row["JobIDRaw"],
        row["JobName"],
        row["User"],
        row["Partition"],
        row["State"].split()[0] if row["State"] else "",  # CANCELLED by 1000
        "",
        int(row["NNodes"] or 0) if row["NNodes"].isdigit() else 0,
        count_gpus(row["AllocTRES"]),
        seconds(row["Start"]),
        seconds(row["End"]),
        row["ExitCode"],
        restarts,
        row["WorkDir"],
        had_nodes=row["NodeList"] not in ("", "None assigned"),
    )


def _queued(row: dict[str, str], accounted: Job | None) -> Job:
    state = row["state"]
    return Job(
        row["job_id"],
        row["raw_id"],
        row["name"],
        row["user"],
        row["partition"],
        state,
        "" if row["reason"] == "None" else row["reason"],
        int(row["nodes"]) if row["nodes"].isdigit() else 0,
        count_gpus(row["tres"]),
        None if state == "PENDING" else seconds(row["start"]),
        accounted.end if accounted is not None and state in ENDED else None,
        accounted.exit_code if accounted is not None and state in ENDED else "",
        int(row["restarts"]) if row["restarts"].isdigit() else 0,
        row["work_dir"],
        _expanded(row["output"], row),
        bool(row["node_list"]),
    )


def _expanded(output: str, row: dict[str, str]) -> str | None:
    """A log's path, with what SLURM leaves in it of a file name's pattern replaced."""
    if output in ("", "(null)", "N/A"):
        return None
    array, _, task = row["job_id"].partition("_")
    values = {"j": row["raw_id"], "A": array, "a": task, "x": row["name"], "u": row["user"]}
    path = re.sub(r"%\d*([jAaxu])", lambda match: values[match[1]], output)
    return str(Path(row["work_dir"], path))


def seconds(text: str) -> float | None:
    """SLURM's `2026-11-28T23:35:27`, which is local time, as seconds since 1970; None for `Unknown`, `N/A`."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
