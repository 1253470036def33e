"""Head nodes: where a cluster is asked for idle nodes, is sent files and takes jobs. This machine may be one."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.cluster.launchers import expand_nodelist
from megatron.cluster.slurm import SECONDS, Slurm, SlurmError

IDLE_FORMAT = "%D|%t|%a|%P|%N"
_IDLE = ("idle", "idle~", "idle#")  # also nodes that are switched off until a job needs them; idle* does not answer
_MARK = "--- answer of the head node ---"
_NEXT = "--- idle nodes ---"


@dataclass(frozen=True)
class Head:
    """`alias`: of the user's own ssh config (`ssh_config`: another file); None is this machine."""

    alias: str | None = None
    ssh_config: str | None = None

    @property
    def ssh(self) -> list[str]:
        """The ssh command without a host: never asks for a password, gives up on a host that does not answer."""
        chosen = ["-F", self.ssh_config] if self.ssh_config else []
        return ["ssh", *chosen, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]

    def run(self, script: str, seconds: float = 60.0) -> str:
        """What a bash script prints there. Raises `SlurmError`.

        It runs in a login shell, since others may have no SLURM commands on their PATH, and goes over standard input:
        the process list of neither machine shows what is in it. What the shell's start-up files print is left out.
        """
        prefix = () if self.alias is None else (*self.ssh, "--", self.alias)
        login = "-c" if self.alias is None else "-lc"
        slurm = Slurm(prefix, seconds)
        answer = slurm.run("bash", login, 'eval "$(cat)"', text=f"echo '{_MARK}'\n{script}")
        return answer.rpartition(f"{_MARK}\n")[2]

    def send(self, source: Path, target: str, *options: str, seconds: float = 1800.0) -> None:
        """Put what is in the folder `source` into the folder `target` there. Raises `SlurmError`."""
        remote = [] if self.alias is None else ["-e", shlex.join(self.ssh)]
        if remote and shlex.quote(target) != target:
            remote.append("--protect-args")  # that of macOS does not know it
        place = target if self.alias is None else f"{self.alias}:{target}"
        command = ["rsync", "-a", "--no-owner", "--no-group", *remote, *options, "--", f"{source}/", f"{place}/"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SlurmError(f"`{shlex.join(command)}` did not end within {seconds:g} s") from error
        except OSError as error:
            raise SlurmError(f"`{shlex.join(command)}` cannot be run: {error.strerror or error}") from error
        if done.returncode != 0:
            raise SlurmError(f"`{shlex.join(command)}` failed: {done.stderr.strip() or done.returncode}")


def ask(head: Head, variables: Sequence[str], partition: str | None) -> tuple[dict[str, str], str]:
    """The values of environment variables there, and `sinfo`'s rows of idle nodes. Raises `SlurmError`."""
    chosen = f"-p {shlex.quote(partition)} " if partition else ""
    script = "".join(f'printf "%s=%s\\n" {name} "${{{name}-}}"\n' for name in variables)
    script += f"echo '{_NEXT}'\nsinfo {chosen}-t idle -h -o '{IDLE_FORMAT}' </dev/null\n"
    told, _, rows = head.run(script, SECONDS).partition(f"{_NEXT}\n")
    pairs = (line.partition("=") for line in told.splitlines())
    return {name: value for name, _, value in pairs if name in variables and value}, rows


def count_idle(rows: str, partition: str | None, excluded: Sequence[str] = ()) -> int:
    """How many nodes a job could have at once: each counts once, in however many rows and partitions it is.

    Without `partition` those of the default one count. `excluded`: nodes to leave out, as SLURM writes lists of them.
    """
    nodes: set[str] = set()
    unnamed = 0
    parsed = [row.split("|", 4) for row in rows.splitlines() if row.strip()]
    defaults = partition is None and any(len(row) == 5 and row[3].endswith("*") for row in parsed)
    for row in parsed:
        if len(row) < 5:
            unnamed += int(row[0]) if row[0].strip().isdigit() else 0
        elif row[1] in _IDLE and row[2] == "up" and not (defaults and not row[3].endswith("*")):
            nodes.update(expand_nodelist(row[4].strip()))
    return len(nodes - {name for part in excluded for name in expand_nodelist(part)}) + unnamed
