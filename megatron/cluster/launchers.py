"""Command lines that start the ranks on several hosts: one pure function per launcher, nothing is run here.

pdsh starts one node agent per host (`megatron.cluster.node`, which starts that host's ranks) and hands it the config
by value. openmpi, mpich/mvapich (Hydra) and slurm start every rank themselves; rank 0 reads the resolved config from a
file and publishes it to the others by value through the rendezvous store, so no other host needs a file of ours.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
import shlex
import signal
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron.cluster.hostfile import Resources
from megatron.errors import UserError, nearest
from megatron.home import HOME
from megatron.secrets import is_secret_variable

RUN_MODULE = HOME / "slurm" / "run_module.py"
"""Starts a module of ours: `python -m` would take that of another clone in the folder it is started in."""
_EXPORTED_PREFIXES = (
    *("NCCL", "UCX", "FI_", "MV2", "OMPI_MCA", "GLOO", "TP_", "TORCH", "PYTHON", "LD_LIBRARY", "OMP_"),
    *("CUDA_DEVICE", "CUDA_LAUNCH", "DS_", "DEEPY_", "HF_", "WANDB", "TRITON"),
)
_LONGEST_ARGUMENT = 120_000  # Linux allows 128 KiB for one argument


@dataclass(frozen=True)
class MultiNodeJob:
    """What has to run where. `exports` reach every rank; `python` and `folder` are the same on all hosts."""

    resources: Resources
    user_script: str
    resolved_file: str
    config_text: str
    python: str
    folder: str
    master_addr: str
    master_port: int
    exports: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Those of `.deepspeed_env`: they reach ranks by ways that nobody else can read, never by a command line."""
    log_folder: str | None = None
    comment: str | None = None
    account: str | None = None
    in_allocation: int | None = None
    """Number of tasks when slurm is to use every node of the allocation we are in; `resources` is then empty."""

    @property
    def world_size(self) -> int:
        return self.in_allocation or sum(len(slots) for slots in self.resources.values())


def select_exports(env: Mapping[str, str], extra: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """(variables that other hosts need, names kept back because they look like secrets).

    From `env` come those of the communication libraries, Python and the trackers, from `extra` (the `.deepspeed_env`
    file) all. Secrets do not belong on a command line that every user of a host can read.
    """
    wanted = {name: value for name, value in env.items() if name.startswith(_EXPORTED_PREFIXES)} | dict(extra)
    secret = sorted(name for name, value in wanted.items() if is_secret_variable(name, value))
    return {name: value for name, value in wanted.items() if name not in secret}, secret


def parse_environment_file(text: str, name: str) -> dict[str, str]:
    """`KEY=VALUE` lines of a `.deepspeed_env` file; `#` comments and blank lines are skipped."""
    values = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = line.removeprefix("export ").partition("=")
        if not equals or not key.strip().isidentifier():
            raise UserError(f"{name}:{number}: the line is not of the form KEY=VALUE")  # it may hold a secret
        values[key.strip()] = value.strip()
    return values


def encode(value: object) -> str:
    """A JSON value as one shell-safe word, compressed."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(value).encode(), 9)).decode()


def decode(word: str) -> object:
    """The inverse of `encode`."""
    return json.loads(zlib.decompress(base64.urlsafe_b64decode(word.encode())))


def pdsh_command(job: MultiNodeJob) -> list[str]:
    """pdsh: one ssh per host; `%n` becomes the host's number. The config travels by value."""
    agent = [
        *(_pdsh_word(job.python), "-u", _pdsh_word(str(RUN_MODULE)), "megatron.cluster.node"),
        *("--node_rank=%n", f"--resources={encode(job.resources)}"),
        *(f"--master_addr={job.master_addr}", f"--master_port={job.master_port}"),
        f"--config={encode(job.config_text)}",
        *([f"--log_folder={_pdsh_word(job.log_folder)}"] if job.log_folder else []),
        _pdsh_word(job.user_script),
    ]
    exports = [f"export {name}={_pdsh_word(value)};" for name, value in sorted(job.exports.items())]
    remote = " ".join([*exports, f"cd {_pdsh_word(job.folder)};", "exec", *agent])
    if len(remote) > _LONGEST_ARGUMENT:
        raise UserError(f"the command for other hosts is {len(remote)} characters long; shorten the config")
    # -S: exit with the worst code of the hosts; -b: end at one SIGINT; -N: no host in front of every line
    return ["pdsh", "-S", "-b", "-N", "-f", "1024", "-w", ",".join(job.resources), remote]


def openmpi_command(job: MultiNodeJob) -> list[str]:
    """Open MPI's mpirun, used only to start processes: `--host h1:2,h2:2`, variables with `-x`.

    Without `--bind-to none` it gives each of two ranks one core, and more of them the same socket.
    """
    exports = {**_rendezvous(job), **job.exports}
    return [
        *("mpirun", "-n", str(job.world_size), "--host", _host_slots(job), "--map-by", "slot", "--bind-to", "none"),
        *(item for name, value in sorted(exports.items()) for item in ("-x", f"{name}={value}")),
        *_rank_command(job),
    ]


def mpich_command(job: MultiNodeJob) -> list[str]:
    """MPICH, MVAPICH and Intel MPI (Hydra's mpirun): `-hosts h1:2,h2:2`, variables with `-genv`."""
    exports = {**_rendezvous(job), **job.exports}
    return [
        *("mpirun", "-n", str(job.world_size), "-hosts", _host_slots(job)),
        *(item for name, value in sorted(exports.items()) for item in ("-genv", name, value)),
        *_rank_command(job),
    ]


def slurm_command(job: MultiNodeJob) -> list[str]:
    """srun: hosts by `--nodelist`, never by filter strings; variables through its own environment."""
    command = ["srun", "-n", str(job.world_size)]
    if job.resources:
        command += ["--nodelist", ",".join(job.resources)]
        per_node = {len(slots) for slots in job.resources.values()}
        if len(per_node) > 1:
            raise UserError("launcher=slurm needs the same number of slots on every host: set num_gpus, or use pdsh")
        command += ["--nodes", str(len(job.resources)), "--ntasks-per-node", str(per_node.pop())]
    command += ["--comment", job.comment] if job.comment else []
    command += ["--account", job.account] if job.account else []
    return [*command, "--kill-on-bad-exit=1", "--export=ALL", *_rank_command(job)]


# `srun: error: node3: task 5: Killed`, `srun: error: node[1-2]: tasks 0-7: Exited with exit code 5`
SRUN_TASK_LINE = re.compile(rb"^srun: error: \S+: tasks? \S+: ")


@dataclass(frozen=True)
class Launcher:
    """One launcher: its program, its command line, and how it behaves when a job is to end (all measured)."""

    tool: str
    command: Callable[[MultiNodeJob], list[str]]
    stop_signal: int = signal.SIGTERM
    """What makes it ask the ranks to save and stop."""
    waits: bool = True
    """Whether it then waits for the ranks; if not, `stopped_code` is its exit code."""
    stopped_code: int | None = None
    failure_line: re.Pattern[bytes] | None = None
    """What it prints about a host that failed while it waits for the others."""
    noted_line: re.Pattern[bytes] | None = None
    """What it prints about a rank that failed: the reason in `status.json` of a run that could not write its own."""
    failure_signal: int | None = None
    """What then makes it stop waiting, `settle` seconds later; None: `stop_signal`."""
    settle: float = 1.0
    grace: float = 4.0
    """Seconds that it may take after that."""


LAUNCHERS: dict[str, Launcher] = {
    # At SIGINT, with -b, it ends the ssh connections; the agents notice and ask their ranks to save.
    "pdsh": Launcher(
        *("pdsh", pdsh_command, signal.SIGINT),
        waits=False,
        stopped_code=1,
        failure_line=re.compile(rb"^pdsh@.*: ssh exited with exit code (\d+)"),
    ),
    # Both kill the ranks at SIGTERM, but pass SIGUSR1 on to them.
    "openmpi": Launcher("mpirun", openmpi_command, signal.SIGUSR1),
    # Ends the other ranks after a failure, but waits for ever for a node whose slurmstepd is gone; at SIGTERM it gives
    # that node up after KillWait of slurm.conf, 30 s by default.
    "slurm": Launcher(
        *("srun", slurm_command, signal.SIGUSR1),
        failure_line=re.compile(rb"^srun: error: \S+: tasks? \S+: Exited with exit code (\d+)"),
        noted_line=SRUN_TASK_LINE,
        failure_signal=signal.SIGTERM,
        settle=30.0,
        grace=90.0,
    ),
    "mvapich": Launcher("mpirun", mpich_command),
    "mpich": Launcher("mpirun", mpich_command),
}


def find_launcher(name: str) -> Launcher:
    """The launcher of that name, or a `UserError` listing the known ones."""
    if name not in LAUNCHERS:
        choices = ", ".join(LAUNCHERS)
        raise UserError(f"launcher={name} is not known.{nearest(name, list(LAUNCHERS))} Choices: {choices}")
    return LAUNCHERS[name]


def command_environment(launcher: str, job: MultiNodeJob, env: Mapping[str, str]) -> dict[str, str]:
    """The environment in which to run the command: without rank variables of this process, which srun would pass on."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    result = {name: value for name, value in env.items() if name not in own}
    if launcher == "pdsh":
        result["PDSH_RCMD_TYPE"] = env.get("PDSH_RCMD_TYPE", "ssh")
    if launcher == "slurm":
        tasks = max(map(len, job.resources.values()), default=int(env.get("SLURM_NTASKS_PER_NODE") or 0))
        result = {**_cores_of_tasks(env, tasks), **result, **_rendezvous(job), **job.exports, **job.secrets}
    return result


def _cores_of_tasks(env: Mapping[str, str], tasks: int) -> dict[str, str]:
    """The cores of each of `tasks` per node of a SLURM job: for srun, which from 22.05 on does not read
    `sbatch --cpus-per-task` and may else give a task one core for all its threads, and for torch, of which each rank
    would else take all cores of its node. Ranks keep theirs, those next to each other near each other, as GPUs are.
    """
    if not (each := int(env.get("SLURM_CPUS_PER_TASK") or 0)):
        on_node = env.get("SLURM_JOB_CPUS_PER_NODE") or env.get("SLURM_CPUS_ON_NODE")
        if not (on_node and tasks):
            return {}
        from megatron.mpu.topology import tasks_per_node  # numpy, which a job's first script may lack

        each = min(tasks_per_node(on_node, "SLURM_JOB_CPUS_PER_NODE")) // tasks
        each -= each % 2  # SLURM counts hardware threads, and gives tasks whole cores
    if each < 2:
        return {"OMP_NUM_THREADS": "1"}
    bound = {"SRUN_CPUS_PER_TASK": str(each), "SLURM_CPU_BIND": "cores", "SLURM_DISTRIBUTION": "block:block"}
    return {**bound, "OMP_NUM_THREADS": str(each)}


def job_port(job: str) -> int:
    """The rendezvous port of the SLURM job of that number: jobs may share a node, as the tasks of an array do."""
    return 29500 + int(job) % 1000


_NODE_ITEM = re.compile(r"(?:[\w.-]+|\[[\d,-]+\])+")  # one item of a node list: a name with lists of numbers in it
_NODE_PART = re.compile(r"[\w.-]+|\[[\d,-]+\]")
_NODE_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_NODES = 100_000


def expand_nodelist(text: str) -> list[str]:
    """SLURM's compressed host list: `"a[1-3,07],b"` -> a1 a2 a3 a07 b. Leading zeros are kept.

    Raises `UserError` for everything that SLURM does not write: hosts are not guessed.
    """
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):
        if _NODE_ITEM.fullmatch(item) is None:
            raise _bad_nodelist(text, item)
        parts = [_expand_part(text, part) for part in _NODE_PART.findall(item)]
        if math.prod(map(len, parts)) > _MOST_NODES:
            raise _bad_nodelist(text, item)
        hosts += map("".join, itertools.product(*parts))
    return hosts


def _expand_part(text: str, part: str) -> list[str]:
    """A part of a name as it is, a `[list of numbers]` as all its numbers."""
    if not part.startswith("["):
        return [part]
    numbers: list[str] = []
    for piece in part[1:-1].split(","):
        match = _NODE_RANGE.fullmatch(piece)
        first, last = match.groups() if match else (None, None)
        if first is None or not 0 <= (count := int(last or first) - int(first)) < _MOST_NODES:
            raise _bad_nodelist(text, part)
        numbers += [str(int(first) + i).zfill(len(first)) for i in range(count + 1)]
    return numbers


def _bad_nodelist(text: str, part: str) -> UserError:
    return UserError(
        f"SLURM_JOB_NODELIST={text!r} is no list of hosts as SLURM writes it, such as a[1-3,07],b: {part!r}. "
        "Is it cut off? `scontrol show job` prints it"
    )


def _pdsh_word(text: str) -> str:
    """Quoted for the remote shell, with `%`, which pdsh would expand, doubled."""
    return shlex.quote(text).replace("%", "%%")


def _rank_command(job: MultiNodeJob) -> list[str]:
    return [job.python, "-u", job.user_script, "--resolved", job.resolved_file]


def _rendezvous(job: MultiNodeJob) -> dict[str, str]:
    devices = _same_devices(job)
    rendezvous = {"MASTER_ADDR": job.master_addr, "MASTER_PORT": str(job.master_port)}
    return {**rendezvous, "CUDA_VISIBLE_DEVICES": devices} if devices else rendezvous


def _host_slots(job: MultiNodeJob) -> str:
    return ",".join(f"{host}:{len(slots)}" for host, slots in job.resources.items())


def _same_devices(job: MultiNodeJob) -> str | None:
    """The GPU numbers to show to every rank when a filter picked some; MPI and SLURM cannot vary them by host."""
    picked = {tuple(slots) for slots in job.resources.values() if slots != list(range(len(slots)))}
    if not picked:
        return None
    if len({tuple(slots) for slots in job.resources.values()}) > 1:
        raise UserError("include/exclude pick different slots on different hosts: only launcher=pdsh can do that")
    return ",".join(map(str, picked.pop()))
