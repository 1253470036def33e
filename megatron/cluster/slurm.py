"""SLURM's commands as functions: rows of text in, values out.

Text formats (`-o`, `-P`) only: the layout of `--json` changes between versions of SLURM, and that of 22.05 has wrong
exit codes. Every call has a limit of time, since a controller that is down answers after minutes.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.errors import DeepyError

SECONDS = 15.0
"""How long a command may take by default."""
WRONG_TIME = "Invalid time specification"
"""What commands of SLURM say of a time that they do not understand."""


class SlurmError(DeepyError):
    """A command of SLURM failed, does not answer in time or does not exist. The message has what it printed."""


@dataclass(frozen=True)
class Slurm:
    """Where the commands run: here, or behind `prefix`, such as `ssh HOST`. `env`: None is this process's."""

    prefix: tuple[str, ...] = ()
    seconds: float = SECONDS
    env: Mapping[str, str] | None = None

    def run(self, *command: str, text: str | None = None) -> str:
        """Standard output of `command`, given `text` on standard input. Raises `SlurmError`."""
        whole = [*self.prefix, shlex.join(command)] if self.prefix else list(command)
        shown = shlex.join([*self.prefix, *(word for word in command if _SEPARATOR not in word)])
        try:
            done = subprocess.run(
                whole,
                input=text,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.seconds,
                env=self.env,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SlurmError(f"`{shown}` gave no answer within {self.seconds:g} s") from error
        except OSError as error:
            raise SlurmError(f"`{shown}` cannot be run: {error.strerror or error}") from error
        # sreport says this, takes a period of its own instead, and ends with 0.
        if done.returncode != 0 or WRONG_TIME in done.stderr:
            said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
            raise SlurmError(f"`{shown}` failed: {said}")
        return done.stdout

    def submit(self, *arguments: str, command: str = "sbatch") -> str:
        """Submit with these arguments; returns the number of the job. `command`: `submit_command` of the profile."""
        return submitted_job(self.run(*submission(command), *arguments), command)

    def job(self, job: str) -> dict[str, str]:
        """Fields of `scontrol show job`: JobState, Restarts, Requeue, Command, StdOut, ...

        Of an array whose number is `job`, the task that has that number too, else the first.
        """
        rows = [parse_fields(line) for line in self.run("scontrol", "--oneliner", "show", "job", job).splitlines()]
        return next((row for row in rows if row.get("JobId") == job), rows[0])

    def queue(self, *arguments: str) -> list[dict[str, str]]:
        """Jobs that wait or run, by `QUEUE_FIELDS`; `--states=all` adds those that ended minutes ago."""
        return self._table(("squeue",), QUEUE_FIELDS, *arguments)

    def nodes(self, *arguments: str) -> list[dict[str, str]]:
        """One row for each node and partition it is in, by `NODE_FIELDS`."""
        return self._table(("sinfo", "--Node"), NODE_FIELDS, *arguments)

    def time_limit(self, partitions: str | None = None) -> float | None:
        """The longest time in seconds that a job may ask for in all of these partitions (`a,b`; None: the default one);
        None when there is no limit, or none is known. Raises `SlurmError`."""
        chosen = [f"--partition={partitions}"] if partitions else []
        rows = [row.split() for row in self.run("sinfo", "--noheader", "--format=%P %l", *chosen).splitlines()]
        limits = [parse_time(row[1]) for row in rows if len(row) == 2 and (partitions or row[0].endswith("*"))]
        return min((limit for limit in limits if limit is not None), default=None)

    def _table(self, command: Sequence[str], fields: Mapping[str, str], *arguments: str) -> list[dict[str, str]]:
        # Without a size a field is as wide as its value.
        layout = ",".join(f"{field}:{_SEPARATOR}" for field in fields.values())
        text = self.run(*command, "--noheader", f"--Format={layout}", *arguments)
        return parse_rows(text, [*fields, "end"], _SEPARATOR)

    def accounting(self, *arguments: str, fields: Sequence[str] | None = None) -> list[dict[str, str]]:
        """Rows of `sacct -P` by the names of its fields: one a job, without steps, unless `arguments` ask for more."""
        names = list(fields or ACCOUNTING_FIELDS)
        layout = (f"--format={','.join(names)}", f"--delimiter={_SEPARATOR}")
        text = self.run("sacct", "--parsable2", "--noheader", "--allocations", *layout, *arguments)
        return parse_rows(text, names, _SEPARATOR)


def own_name(fields: Mapping[str, str]) -> str:
    """By what a command acts on the job with these fields alone: one task of an array has the number of all of it."""
    task = fields.get("ArrayTaskId", "")
    return f"{fields['ArrayJobId']}_{task}" if task.isdigit() and "ArrayJobId" in fields else fields["JobId"]


_SEPARATOR = "\x1f"  # in no name of a job, unlike `|`
QUEUE_FIELDS = {
    "job_id": "JobArrayID",
    "raw_id": "JobID",  # SLURM_JOB_ID of the job: of a task of an array another number
    "name": "Name",
    "user": "UserName",
    "account": "Account",
    "partition": "Partition",
    "state": "State",
    "reason": "Reason",
    "nodes": "NumNodes",
    "node_list": "NodeList",
    "time": "TimeUsed",
    "time_left": "TimeLeft",
    "start": "StartTime",
    "tres": "tres-alloc",  # of a job that waits: what it asks for
    "restarts": "RestartCnt",
    "work_dir": "WorkDir",
    "command": "Command",
    "output": "STDOUT",
    "comment": "Comment",
    "dependency": "Dependency",
}
"""Names of `Slurm.queue`'s fields, with those of `squeue --Format`."""
NODE_FIELDS = {
    "node": "NodeList",
    "partition": "Partition",  # the default one ends in *
    "state": "StateComplete",
    "gres": "Gres",
    "gres_used": "GresUsed",
}
"""Names of `Slurm.nodes`' fields, with those of `sinfo --Format`."""
ACCOUNTING_FIELDS = (
    *(
        "JobID",
        "JobIDRaw",
        "JobName",
        "User",
        "Account",
        "Partition",
        "State",
        "ExitCode",
        "Submit",
        "Start",
        "End",
        "Elapsed",
    ),
    *("NodeList", "NNodes", "AllocTRES", "WorkDir"),
)


# Of a job, and not of one that is submitted from it: rank variables, what SLURM set for it (in the environment of
# sbatch those would be the wishes for the next one, or be kept in it), the address of W&B's process.
_OF_A_JOB = re.compile(
    r"(SLURM|SLURMD|PMI|PMIX|OMPI|TORCHELASTIC)_|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|WANDB_SERVICE$"
)
_DEVICES = re.compile(r"(CUDA|ROCR|HIP)_VISIBLE_DEVICES$|GPU_DEVICE_ORDINAL$")
_TRAVELS = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JOB_CHAIN_COUNT")
OF_TRAINING = "DEEPY_OF_TRAINING"
"""A variable: the name of one that a cluster profile has set for training jobs only (`hub_offline`)."""


def environment_for_next(env: Mapping[str, str], *, devices: bool = False) -> dict[str, str]:
    """The environment in which to submit another job: ours without what belongs to the job that we may be in.

    `devices`: keep which GPUs are ours, for a process that shares them.
    """
    others = {name: value for name, value in env.items() if name in _TRAVELS or not _OF_A_JOB.match(name)}
    if (name := others.pop(OF_TRAINING, None)) is not None:  # a training job's script sets it again
        others.pop(name, None)
    return {name: value for name, value in others.items() if devices or not _DEVICES.match(name)}


def submission(command: str) -> list[str]:
    """The words of `sbatch`, or of a site's wrapper of it with flags, that ask for the number of the job alone."""
    return [*shlex.split(command), "--parsable"]


def submitted_job(answer: str, command: str) -> str:
    """The number of the job in what `command` printed: a wrapper may say more, or not know --parsable, and the job is
    queued all the same. Raises `SlurmError`."""
    pattern = r"^[ \t]*(?:Submitted batch job )?(\d+)(?:;.*| on cluster .*)?[ \t]*$"
    if numbers := re.findall(pattern, answer, re.MULTILINE):
        return str(numbers[-1])
    raise SlurmError(f"{command} answered {answer!r} instead of the number of a job")


def parse_fields(line: str) -> dict[str, str]:
    """`JobId=7 JobName=a b Command=/x/y.sh c` -> fields; a value may hold blanks, and `=` inside brackets or paths."""
    names = list(re.finditer(r"(?:^|\s)([A-Z][\w/:]*)=", line))
    ends = [match.start() for match in names[1:]] + [len(line)]
    return {match[1]: line[match.end() : end].strip() for match, end in zip(names, ends)}


def parse_rows(text: str, names: Sequence[str], separator: str) -> list[dict[str, str]]:
    """Lines of fields between separators. Raises `SlurmError` for a line with another number of fields."""
    rows = [line.split(separator) for line in text.splitlines() if line.strip()]
    for row in rows:
        if len(row) != len(names):
            raise SlurmError(f"SLURM answered {len(row)} fields instead of {len(names)}: {separator.join(row)[:200]!r}")
    return [dict(zip(names, (field.strip() for field in row))) for row in rows]


def parse_time(text: str) -> float | None:
    """A time of SLURM's (`30` minutes, `30:00`, `2:00:00`, `1-12`, `1-12:00:00`) in seconds; None without a limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text.strip())
    if found is None:  # infinite, UNLIMITED, n/a
        return None
    numbers = [int(part) for part in found[2].split(":")]
    if found[1] is None and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return (24 * int(found[1] or 0) + hours) * 3600.0 + minutes * 60.0 + seconds or None


def count_gpus(text: str) -> int:
    """GPUs in a text of SLURM's: `cpu=8,gres/gpu=4` (TRES), `gpu:a100:4(S:0-1),gpu:h100:2` (gres), `gres:gpu:4`."""
    if whole := re.search(r"gres/gpu=(\d+)", text):
        return int(whole[1])
    return sum(int(count) for count in re.findall(r"\bgpu(?:[:=][A-Za-z][\w.-]*)?[:=](\d+)", text))
