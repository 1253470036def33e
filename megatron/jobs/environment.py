"""What a job runs in: the shell lines of a cluster's profile, the number of ranks, folders, a hostfile.

In a job's script, and by hand in an interactive session on a cluster:

    eval "$(python -m megatron.jobs.environment)"                                      # of the cluster we are on
    eval "$(python -m megatron.jobs.environment --cluster isambard-slingshot --nccl wheel)"
    sbatch $(python -m megatron.jobs.environment --sbatch-flags pretrain) pretrain_neox.sbatch CONFIG...

stdout has shell lines, stderr says what they do. Needs no torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.cluster.launchers import RUN_MODULE, expand_nodelist, job_port
from megatron.cluster.profile import VARIABLE, ClusterProfile, find_profile, profile_folders, sbatch_flags
from megatron.cluster.slurm import OF_TRAINING, Slurm, SlurmError, count_gpus
from megatron.errors import UserError, run_cli
from megatron.files import write_atomically
from megatron.flags import Parser
from megatron.log import configure, get_logger, result

logger = get_logger(__name__)

_LIBRARY = "libnccl.so.2"
_SYSTEM_FOLDERS = ("/usr/lib64", "/usr/local/lib", *(f"/usr/lib/{kind}-linux-gnu" for kind in ("x86_64", "aarch64")))


@dataclass(frozen=True)
class Ranks:
    """How many ranks a job starts: `per_node` on each of `nodes`; `reason` is for people. `gpus`: per node."""

    nodes: int
    per_node: int
    gpus: int
    reason: str


def ranks_of(env: Mapping[str, str], profile: ClusterProfile) -> Ranks:
    """The ranks of the SLURM job that `env` describes: its tasks where it was submitted with a number of tasks, else
    one for each GPU, else one for each node. Raises `UserError` for what has no single answer."""
    nodes = int(env.get("SLURM_JOB_NUM_NODES") or env["SLURM_NNODES"])
    gpus = given_gpus(env)
    if not gpus and not env.get("SLURM_GPUS_PER_NODE") and profile.gpus_per_node:
        has = f"nodes of {profile.name} have {profile.gpus_per_node} GPUs, but this job was given none"
        raise UserError(f"{has}: sbatch --gpus-per-node={profile.gpus_per_node} (0: train on the CPUs)")
    total = env.get("SLURM_GPUS", "").rpartition(":")[2]
    if total.isdigit() and int(total) != nodes * gpus:
        raise UserError(f"--gpus={total} is not the same number on each of {nodes} nodes: give --gpus-per-node instead")
    tasks = _asked_tasks(env, nodes)
    if tasks is not None:
        if gpus and tasks != gpus:
            logger.warning(
                f"{tasks} ranks share {gpus} GPUs on each node, because --ntasks or --ntasks-per-node says so"
            )
        return Ranks(nodes, tasks, gpus, f"{tasks} on each of {nodes} nodes, the tasks of the job")
    if gpus:
        return Ranks(nodes, gpus, gpus, f"one for each of the {gpus} GPUs on {nodes} nodes")
    return Ranks(nodes, 1, 0, f"one on each of {nodes} nodes (without GPUs; --ntasks-per-node=N starts more)")


def given_gpus(env: Mapping[str, str]) -> int:
    """GPUs on each node of the SLURM job that `env` describes: as asked for, else as given."""
    # --gpus-per-node=2, --gpus-per-node=a100:2; SLURM_GPUS_ON_NODE also counts those that --exclusive brings
    asked = env.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    return int(asked if asked.isdigit() else env.get("SLURM_GPUS_ON_NODE") or 0)


def _asked_tasks(env: Mapping[str, str], nodes: int) -> int | None:
    """Tasks per node, where the job was submitted with a number of tasks."""
    if per_node := env.get("SLURM_NTASKS_PER_NODE"):
        return int(per_node)
    if not (total := env.get("SLURM_NTASKS")):
        return None
    if int(total) % nodes:
        raise UserError(f"--ntasks={total} is not the same number on each of {nodes} nodes: give --ntasks-per-node")
    return int(total) // nodes


# --gpus-per-task, --gpu-bind: srun would show each rank one GPU, as number 0
_HIDING = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND")
_OF_A_STEP = ("SLURM_STEP", "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_SRUN_COMM")


def own_variables(env: Mapping[str, str], slurm: Slurm) -> dict[str, str | None]:
    """Variables to set, or to unset (None), because they are not this job's own: sbatch hands on those of the job or
    step in which somebody typed it, and SLURM then replaces only what this job asked for.

    Without an answer from SLURM only what no batch script has is unset.
    """
    own: dict[str, str | None] = {name: None for name in env if name.startswith(_OF_A_STEP)}
    try:
        job = slurm.job(env["SLURM_JOB_ID"])
    except SlurmError as error:
        logger.warning(f"{error}")
        return own
    per_node, tasks = job.get("NtasksPerN:B:S:C", "").partition(":")[0], job.get("NumTasks", "")
    cores = job.get("CPUs/Task", "")
    if per_node in ("", "0", "*") and tasks == env.get("SLURM_JOB_NUM_NODES"):
        tasks = "0"  # what SLURM says when nobody asked
    asked = {
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_NTASKS": tasks,
        "SLURM_CPUS_PER_TASK": "0" if cores == "1" else cores,
        "SLURM_GPUS_PER_NODE": str(count_gpus(job.get("TresPerNode", ""))),
        "SLURM_GPUS": str(count_gpus(job.get("TresPerJob", ""))),
        "SLURM_RESTART_COUNT": job.get("Restarts", ""),
    }
    for name, value in asked.items():
        there = env.get(name, "").rpartition(":")[2]  # of GPUs: `a100:4`
        if there not in ("", value) and (name, there) != ("SLURM_GPUS_PER_NODE", "0"):  # SLURM keeps no record of a 0
            own[name] = value if value.isdigit() and int(value) else None
    return own


# ---- lines of the shell


def profile_lines(profile: ClusterProfile, env: Mapping[str, str], nccl: str | None = None) -> Iterator[str]:
    """Shell lines for every command on this cluster: modules, variables, folders, which NCCL (`nccl` or the profile's).

    Makes the folders for logs and temporary files. Raises `UserError`.
    """
    known = profile.path.parent in profile_folders(env)
    yield _export("DEEPY_CLUSTER", profile.name if known else str(profile.path.resolve()))
    modules = (["purge"] if profile.modules.purge else []) + [f"load {shlex.quote(m)}" for m in profile.modules.load]
    if modules:
        yield 'command -v module > /dev/null || . "${MODULESHOME:-/usr/share/modules}/init/bash"'
    where = profile.lines.get("modules.load") or profile.lines.get("modules", str(profile.path))
    for command in modules:
        failed = shlex.quote(f"error: {where}: `module {command}` failed")
        yield f"module {command} || {{ echo {failed} >&2; (exit 2); }}"
    for name, value in profile.environment.items():
        yield f"export {name}={quote(value)}"
    for name, kind, inside in (("TMPDIR", "tmp", ""), ("WANDB_DIR", "logs", "wandb")):
        if (folder := profile.folder(kind, env)) is not None:
            yield _export(name, str(_made(Path(folder, inside), f"{profile.lines[f'folders.{kind}']}: folders.{kind}")))
    chosen = nccl or profile.nccl
    if chosen == "wheel":
        yield from nccl_lines(_wheel_library(), "the wheel's, next to torch")
    elif chosen == "system":  # where it is, only its module says
        again = shlex.join([sys.executable, str(RUN_MODULE), "megatron.jobs.environment", "--system-nccl"])
        yield f'eval "$({again})"'


def training_lines(profile: ClusterProfile, env: Mapping[str, str], slurm: Slurm) -> Iterator[str]:
    """Shell lines for a training job on top: its ranks, their port, no questions to the Hub. Says what was chosen.

    Raises `UserError`.
    """
    if profile.hub_offline and "HF_HUB_OFFLINE" not in env:
        yield "export HF_HUB_OFFLINE=1"
        yield _export(OF_TRAINING, "HF_HUB_OFFLINE")
    if "SLURM_JOB_ID" not in env:
        logger.info(f"cluster {profile.name} ({profile.path}); this is not a SLURM job")
        return
    job, own = env["SLURM_JOB_ID"], own_variables(env, slurm)
    yield from (f"unset {name}" if value is None else _export(name, value) for name, value in own.items())
    env = {name: value for name, value in {**env, **own}.items() if value is not None}
    ranks = ranks_of(env, profile)
    if hiding := [name for name in _HIDING if "gpu" in f"{name}={env.get(name, '')}".lower() and name in env]:
        logger.info(f"without {', '.join(hiding)}: every rank sees all GPUs of its node and takes that of its number")
        yield from (f"unset {name}" for name in hiding)
    total = ranks.nodes * ranks.per_node
    # srun reads these: --exclusive brings GPUs to a job, but to its steps only where they ask
    values: dict[str, object] = {"SLURM_NTASKS": total, "SLURM_NPROCS": total, "SLURM_NTASKS_PER_NODE": ranks.per_node}
    values |= {"SLURM_TASKS_PER_NODE": f"{ranks.per_node}(x{ranks.nodes})"}
    values |= {"SLURM_GPUS_PER_NODE": ranks.gpus} if ranks.gpus and "SLURM_GPUS_PER_NODE" not in env else {}
    values |= {"MASTER_PORT": job_port(job)} if not env.get("MASTER_PORT") else {}
    for name, value in values.items():
        yield _export(name, str(value))
    nodes = env.get("SLURM_JOB_NODELIST", "")
    logger.info(f"job {job} on {nodes}, cluster {profile.name} ({profile.path})")
    logger.info(f"{total} ranks: {ranks.reason}")
    for host in sorted(set(profile.exclude_nodes) & set(expand_nodelist(nodes) if nodes else [])):
        flag = f"sbatch --exclude={','.join(profile.exclude_nodes)}"
        logger.warning(f"{profile.lines['exclude_nodes']}: {host} is a node to avoid, and in this job: {flag}")
    try:
        logger.info(f"nodes of the cluster: {node_states(slurm)}")
    except SlurmError as error:
        logger.warning(str(error))


def nccl_lines(library: Path | None, what: str) -> Iterator[str]:
    """Shell lines that have every program load this NCCL; one that fails, where torch needs a newer one."""
    if library is None:
        logger.warning(f"no {_LIBRARY} was found ({what}): NCCL_LIBRARY and LD_PRELOAD are left as they are")
    elif (problem := _torch_lacks(library)) is not None:
        yield f"{{ echo {shlex.quote(f'error: {problem}')} >&2; (exit 2); }}"
    else:
        yield _export("NCCL_LIBRARY", str(library))
        yield _export("LD_PRELOAD", str(library))


def _torch_lacks(library: Path) -> str | None:
    """Why torch cannot be imported with this NCCL; None when it can, and where there is no torch."""
    command, env = [sys.executable, "-c", "import torch"], {**os.environ, "LD_PRELOAD": str(library)}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=120)
    except subprocess.TimeoutExpired:  # a slow file system; the run will tell
        return None
    return missing_symbol(done.stderr, str(library))


def missing_symbol(output: str, library: str) -> str | None:
    """What to do about an NCCL that is too old for torch, when a program has ended because of that."""
    if (symbol := re.search(r"undefined symbol: (nccl\w+)", output)) is None:
        return None
    return (
        f"the NCCL that is loaded ({library}) lacks {symbol[1]}, which this torch needs: load a newer module, or set "
        "`nccl: wheel` in the profile of the cluster"
    )


def _wheel_library() -> Path | None:
    for folder in map(Path, sys.path):
        if (library := folder / "nvidia/nccl/lib" / _LIBRARY).is_file():
            return library
    return None


def system_library(env: Mapping[str, str]) -> Path | None:
    """The NCCL of the loaded module (`NCCL_HOME`, ..., `LD_LIBRARY_PATH`), else of the system; never the wheel's."""
    homes = [Path(env[name], "lib") for name in ("NCCL_HOME", "NCCL_ROOT", "NCCL_DIR") if env.get(name)]
    paths = [Path(part) for part in env.get("LD_LIBRARY_PATH", "").split(":") if part]
    for folder in [*homes, *paths, *map(Path, _SYSTEM_FOLDERS)]:
        if (folder / _LIBRARY).is_file() and "site-packages" not in folder.parts:
            return folder / _LIBRARY
    return None


def quote(text: str) -> str:
    """`text` as one word of the shell, in which only `${VAR}` and `${VAR:-default}` are expanded."""
    words, end = [], 0
    for match in VARIABLE.finditer(text):
        name, default = match.groups()
        words.append(shlex.quote(text[end : match.start()]) if match.start() > end else "")
        words.append(f'"${{{name}:-{default or ""}}}"')
        end = match.end()
    return "".join(words) + (shlex.quote(text[end:]) if end < len(text) or not text else "")


def _export(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)}"


# ---- what is around a job


def node_states(slurm: Slurm) -> str:
    """`14 allocated, 3 idle, 1 down+drain`: all nodes of the cluster, each counted once."""
    states = Counter({row["node"]: row["state"] for row in slurm.nodes()}.values())
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items(), key=lambda one: (-one[1], one[0])))


def link_log(name: str, profile: ClusterProfile, env: Mapping[str, str], slurm: Slurm) -> None:
    """A link of that name to the job's log in the profile's folder of logs, wherever `sbatch --output` put it."""
    folder = profile.folder("logs", env)
    if folder is None or "SLURM_JOB_ID" not in env:
        return
    try:
        log = Path(slurm.job(env["SLURM_JOB_ID"]).get("StdOut", ""))
    except SlurmError as error:
        logger.warning(f"no link to the log in {folder}: {error}")
        return
    link = Path(folder, name)
    if log.is_file() and not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(log)


def write_hostfile(path: Path, env: Mapping[str, str], profile: ClusterProfile) -> None:
    """The nodes of this job as a hostfile of DeepSpeed's launchers. Deepy's own start does not need one."""
    if not env.get("SLURM_JOB_NODELIST"):
        raise UserError("--hostfile: this is not a SLURM job (SLURM_JOB_NODELIST is not set)")
    slots = ranks_of(env, profile).per_node
    write_atomically(path, "".join(f"{host} slots={slots}\n" for host in expand_nodelist(env["SLURM_JOB_NODELIST"])))


def _made(folder: Path, where: str) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{where}: cannot make {folder}: {error.strerror}") from error
    return folder


def main() -> None:
    flags = Parser(
        prog="python -m megatron.jobs.environment",
        description=__doc__,
    )
    flags.add_argument("--cluster", metavar="NAME", help="the profile (default: DEEPY_CLUSTER, else detection)")
    flags.add_argument("--nccl", choices=("system", "wheel"), help="which NCCL to preload (default: the profile's)")
    flags.add_argument("--training", action="store_true", help="also the ranks and their port, for a training job")
    flags.add_argument("--hostfile", type=Path, metavar="PATH", help="write the job's nodes there, for DeepSpeed")
    flags.add_argument(
        *("--sbatch-flags", "--sbatch_flags"),
        nargs="?",
        const="",
        metavar="KIND",
        help="print the profile's flags for sbatch instead, with the nodes for this kind of job (pretrain, debug, ...)",
    )
    flags.add_argument("--log-name", metavar="NAME", help="link the job's log into the folder of logs by this name")
    flags.add_argument("--system-nccl", action="store_true", help=argparse.SUPPRESS)
    given = flags.parse_args()
    configure()
    env = dict(os.environ)
    if given.system_nccl:
        lines = list(nccl_lines(system_library(env), "NCCL_HOME, LD_LIBRARY_PATH, the system's folders"))
    else:
        profile = find_profile(env, given.cluster)
        if given.sbatch_flags is not None:
            return result(shlex.join(sbatch_flags(profile, given.sbatch_flags or None)))
        lines = list(profile_lines(profile, env, given.nccl))
        lines += training_lines(profile, env, Slurm()) if given.training else []
        if given.log_name:
            link_log(given.log_name, profile, env, Slurm())
        if given.hostfile is not None:
            write_hostfile(given.hostfile, env, profile)
            lines.append(_export("DLTS_HOSTFILE", str(given.hostfile.resolve())))
    for line in lines:
        result(line)


if __name__ == "__main__":
    run_cli(main)
