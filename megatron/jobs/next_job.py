"""The job that follows this one: the same requeued, or a new one with the same script, flags and arguments."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from megatron.cluster.slurm import Slurm, SlurmError, environment_for_next, own_name
from megatron.files import write_atomically
from megatron.jobs.chain import Standing, standing_of
from megatron.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")
SCRIPT = "chain.sbatch"
_WAITS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # a controller is restarted within minutes
_UNSET = ("", "(null)", "N/A", "None", "Unknown", "0", "*")
# Of `scontrol show job`, with the flag of sbatch for each.
_FLAGS = {
    "JobName": "job-name",
    "NumNodes": "nodes",
    "NumTasks": "ntasks",
    "CPUs/Task": "cpus-per-task",
    "TimeLimit": "time",
    "TimeMin": "time-min",
    "Partition": "partition",
    "Account": "account",
    "QOS": "qos",
    "Reservation": "reservation",
    "Features": "constraint",
    "MinMemoryNode": "mem",
    "MinMemoryCPU": "mem-per-cpu",
    "MinTmpDiskNode": "tmp",
    "Licenses": "licenses",
    "Network": "network",
    "Comment": "comment",
    "WorkDir": "chdir",
    "ReqNodeList": "nodelist",
    "MailUser": "mail-user",
    "MailType": "mail-type",
}


def persist(call: Callable[[], T], waits: Sequence[float] = _WAITS) -> T:
    """What `call` returns, tried again after each of `waits` (seconds) while SLURM fails or does not answer.

    Raises `SlurmError`, at once where the command does not exist.
    """
    for wait in waits:
        try:
            return call()
        except SlurmError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise
            logger.warning(f"{error}; trying again in {wait:g} s")
            time.sleep(wait)
    return call()


def await_ranks(slurm: Slurm, job: str, restart: int, seconds: float = 600.0) -> dict[str, str]:
    """SLURM's fields of the job when none of its ranks run any more: a requeue would kill one that saves.

    Gives up waiting after `seconds`, and when SLURM has requeued the job, restarted `restart` times when it began, or
    ends it at its time limit: then only its `KillWait` is left, and a requeue does not shorten that.
    """
    deadline, said = time.monotonic() + seconds, False
    while True:
        fields = persist(lambda: slurm.job(job))
        if standing_of(fields, restart) in (Standing.REQUEUED, Standing.TIME_LIMIT):
            return fields
        listed = persist(
            partial(slurm.run, "squeue", "--steps", "--noheader", "--jobs", own_name(fields), "--format=%i")
        )
        running = [step for step in listed.split() if step.rpartition(".")[2].isdigit()]
        if not running:
            return fields
        if time.monotonic() > deadline:
            logger.warning(f"ranks of job {job} still run after {seconds:g} s; SLURM ends them")
            return fields
        if not said:
            logger.info(f"waiting for the end of {', '.join(running)}, whose ranks may still save")
            said = True
        time.sleep(1.0)


def can_requeue(job: Mapping[str, str]) -> bool:
    """Whether SLURM may requeue the job of these fields (`--no-requeue`, or the cluster's rule)."""
    return job.get("Requeue", "0") == "1"


def requeue(slurm: Slurm, job: str, restart: int, fields: Mapping[str, str], exclude: Sequence[str]) -> None:
    """Requeue this job, without the nodes in `exclude`. From then on SLURM ends our processes.

    Called again after an answer of SLURM was lost, it does what is left: a job is requeued once. Raises `SlurmError`.
    """
    now = slurm.job(job)
    if standing_of(now, restart) is not Standing.REQUEUED:
        slurm.run("scontrol", "requeue", own_name(now))
    if exclude:  # SLURM takes that for pending jobs only, which this one now is
        nodes = ",".join([*_exclusions(fields), *exclude])
        try:
            slurm.run("scontrol", "update", f"JobId={own_name(now)}", f"ExcNodeList={nodes}")
        except SlurmError as error:
            logger.warning(f"the next job may run on {', '.join(exclude)} again: {error}")


def resubmit(
    env: Mapping[str, str],
    fields: Mapping[str, str],
    arguments: Sequence[str],
    folder: Path,
    exclude: Sequence[str],
    command: str = "sbatch",
) -> str:
    """Submit this job's script again, to start when this job has ended; returns the number of the new job.

    `env`: of this job, with what the next one is to have besides. The script is SLURM's copy of it, kept in `folder`:
    the user's file may have changed. A job of the same name that waits for the end of this one is that job already: an
    answer of SLURM may have been lost. Raises `SlurmError`.
    """
    job, slurm = own_name(fields), Slurm(env=environment_for_next(env))
    for row in slurm.queue("--me"):
        if row["name"] == fields["JobName"] and re.search(rf"\bafterany:{job}\b", row["dependency"]):
            return row["raw_id"]
    script = folder / SCRIPT
    write_atomically(script, slurm.run("scontrol", "write", "batch_script", fields["JobId"], "-"))
    flags = [*flags_of(fields, env, exclude), f"--dependency=afterany:{job}"]
    return slurm.submit(*flags, str(script.absolute()), *arguments, command=command)


def flags_of(fields: Mapping[str, str], env: Mapping[str, str], exclude: Sequence[str] = ()) -> list[str]:
    """The flags for sbatch that give a job like the one with these fields of `scontrol show job`, and environment."""
    given = {flag: fields.get(name, "") for name, flag in _FLAGS.items()}
    # The job's number of ranks (jobs/environment.py), which SLURM does not know where it follows from the GPUs.
    given["ntasks-per-node"] = env.get("SLURM_NTASKS_PER_NODE") or fields.get("NtasksPerN:B:S:C", "").partition(":")[0]
    if given["ntasks-per-node"] not in _UNSET:
        given["ntasks"] = ""
    given |= _gpus(fields)
    given["exclude"] = ",".join([*_exclusions(fields), *exclude])
    # The number of the job in the names of its logs is that of the next one there.
    number = re.compile(rf"(?<!\d){fields.get('JobId', '-')}(?!\d)(?=[^/]*$)")
    for name, flag in (("StdOut", "output"), ("StdErr", "error")):
        given[flag] = number.sub("%j", fields.get(name, ""))
    if given["error"] == given["output"]:
        given["error"] = ""
    flags = [f"--{flag}={value}" for flag, value in given.items() if value not in _UNSET]
    if fields.get("ArrayTaskId", "").isdigit():
        flags.append(f"--array={fields['ArrayTaskId']}")
    if fields.get("OverSubscribe") == "NO":
        flags.append("--exclusive")
    if not can_requeue(fields):
        flags.append("--no-requeue")
    if env.get("SLURM_GPUS_PER_NODE") == "0":  # not the same as no word about GPUs
        flags.append("--gpus-per-node=0")
    return [*flags, "--open-mode=append"]


def _exclusions(fields: Mapping[str, str]) -> list[str]:
    nodes = fields.get("ExcNodeList", "")
    return [] if nodes in _UNSET else [nodes]


def _gpus(fields: Mapping[str, str]) -> dict[str, str]:
    """`TresPerNode=gres:gpu:gh200:4` (`gres/gpu:gh200:4` in newer versions) as `--gpus-per-node=gh200:4`."""
    found = {}
    for name, of in (("TresPerNode", "gpus-per-node"), ("TresPerJob", "gpus"), ("TresPerTask", "gpus-per-task")):
        parts = [re.sub(r"^gres[:/]", "", part) for part in fields.get(name, "").split(",")]
        others = [part for part in parts if part not in _UNSET and not re.match(r"gpu(:|=)", part)]
        gpus = [re.sub(r"^gpu[:=]", "", part) for part in parts if re.match(r"gpu(:|=)", part)]
        if gpus:
            found[of] = ",".join(gpus)
        if others and name == "TresPerNode":
            found["gres"] = ",".join(others)
    return found
