"""From a config to running ranks: how many, where, started by what."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron.cluster.config_file import config_file
from megatron.cluster.devices import count_gpus, reserve_port
from megatron.cluster.hostfile import DEFAULT_HOSTFILE, Resources, find_hostfile, parse_hostfile, select
from megatron.cluster.launchers import (
    LAUNCHERS,
    MultiNodeJob,
    command_environment,
    expand_nodelist,
    find_launcher,
    job_port,
    select_exports,
)
from megatron.cluster.local import LocalJob, run_local
from megatron.cluster.node import node_job, read_environment_files, with_library_on_path
from megatron.cluster.outcome import await_end, outcome, record_end
from megatron.cluster.slurm import Slurm, SlurmError, parse_fields
from megatron.cluster.status import run_folder, stop_limits
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs

logger = get_logger(__name__)

LOCALHOST = "localhost"
_MOST_RANKS = 1_000_000  # of one job: more is a slip of the pen


@dataclass(frozen=True)
class Placement:
    """Where the ranks go. `launcher` None: this machine, started by us. Empty `resources`: the SLURM allocation.
    `gpus`: how many this machine has, when no hostfile and no allocation decide where the ranks run.
    """

    resources: Resources
    world_size: int
    launcher: str | None = None
    hosts: tuple[str, ...] = (LOCALHOST,)
    gpus: int | None = None

    def describe(self) -> str:
        """One line for people."""
        if self.launcher is None:
            return f"{_times(self.world_size, 'rank')} on this machine"
        shown = ", ".join(self.hosts[:8]) + (", ..." if len(self.hosts) > 8 else "")
        ranks, hosts = _times(self.world_size, "rank"), _times(len(self.hosts), "host")
        return f"{ranks} on {hosts} ({shown}) by {self.launcher}"


def _times(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def place(args: NeoXArgs, env: Mapping[str, str], default_hostfile: str = DEFAULT_HOSTFILE) -> Placement:
    """Decide how many ranks run where. Reads the hostfile; starts nothing. Raises `UserError`."""
    launcher, parallel, gpus = args.launcher, args.parallel, None
    chosen = partial(
        select,
        include=launcher.include,
        exclude=launcher.exclude,
        num_nodes=launcher.num_nodes,
        where=lambda key: f"{args.source(key)}: " if ":" in args.source(key) else "",
    )
    hostfile = _hostfile(args, env, default_hostfile)
    if hostfile is not None:
        resources = chosen(parse_hostfile(hostfile), num_gpus=parallel.num_gpus)
    elif launcher.launcher == "slurm" and "SLURM_JOB_ID" in env:
        return _in_allocation(env)
    else:
        gpus = count_gpus(env)
        _refuse_other_machines(args, gpus)
        resources = chosen({LOCALHOST: list(range(_local_ranks(args, gpus)))})
    world_size = sum(len(slots) for slots in resources.values())
    if hostfile is not None and parallel.global_num_gpus not in (None, world_size):
        raise UserError(
            f"global_num_gpus={parallel.global_num_gpus}, but {hostfile} and the filters give {world_size} slots"
        )
    starter = _launcher(args, hostfile is not None, len(resources))
    if starter is None and hostfile is not None and next(iter(resources)) not in (LOCALHOST, socket.gethostname()):
        logger.info(f"{hostfile}: one host ({next(iter(resources))}): the ranks run on this machine")
    return Placement(resources, world_size, starter, tuple(resources), gpus)


def _hostfile(args: NeoXArgs, env: Mapping[str, str], default: str) -> Path | None:
    source = args.source("hostfile")
    return find_hostfile(args.launcher.hostfile, env, default, source if ":" in source else None)


def _refuse_other_machines(args: NeoXArgs, gpus: int) -> None:
    """Raise `UserError` when the config asks for more machines than this one, and no hostfile names them."""
    launcher, parallel, missing = args.launcher, args.parallel, ""
    asked = [f"num_nodes={launcher.num_nodes}"] if launcher.num_nodes > 1 else []
    if launcher.hostfile:
        missing = f"{args.source('hostfile')}: hostfile: {launcher.hostfile} does not exist, and "
        asked += [f"{key}={args.get(key)}" for key in ("include", "exclude") if args.get(key)]
        one_has = parallel.num_gpus or gpus
        if one_has and (parallel.global_num_gpus or 0) > one_has:
            asked.append(f"global_num_gpus={parallel.global_num_gpus} (one machine has {one_has})")
    if asked:
        raise UserError(
            f"{missing}{', '.join(asked)} needs to know the hosts: give hostfile=PATH (lines `host slots=N`), "
            "or launcher=slurm inside a SLURM job"
        )


def ranks_of_hostfile(args: NeoXArgs, env: Mapping[str, str], default_hostfile: str = DEFAULT_HOSTFILE) -> int | None:
    """How many ranks a hostfile gives the run; None when there is no hostfile."""
    found = _hostfile(args, env, default_hostfile)
    return place(args, env, default_hostfile).world_size if found is not None else None


def _local_ranks(args: NeoXArgs, gpus: int) -> int:
    """Ranks on this machine: as asked for, else its GPUs, else what the layout needs."""
    parallel = args.parallel
    asked = parallel.num_gpus or parallel.global_num_gpus
    sizes = [max(1, args.get(f"{axis}_parallel_size")) for axis in ("pipe", "model", "expert")]
    ranks = asked or gpus or math.prod(sizes)
    if ranks > _MOST_RANKS:
        raise UserError(f"pipe, model and expert_parallel_size {' x '.join(map(str, sizes))} are {ranks} ranks")
    return ranks


def _launcher(args: NeoXArgs, has_hostfile: bool, hosts: int) -> str | None:
    """Who starts the ranks; None: we do, here. MPI and SLURM are honoured on one host too."""
    name = args.launcher.launcher
    if hosts > 1 or args.launcher.force_multi or name in ("openmpi", "mvapich", "mpich"):
        return name
    if name == "slurm" and has_hostfile:
        return name
    if name == "slurm":
        logger.info("launcher: slurm, but this is not a SLURM job and there is no hostfile: running on this machine")
    return None


def _in_allocation(env: Mapping[str, str]) -> Placement:
    from megatron.mpu.topology import slurm_world_size

    hosts = expand_nodelist(env.get("SLURM_JOB_NODELIST", ""))
    nodes = env.get("SLURM_JOB_NUM_NODES", str(len(hosts)))
    if nodes != str(len(hosts)):
        shown = env.get("SLURM_JOB_NODELIST")
        raise UserError(f"SLURM_JOB_NODELIST={shown} names {len(hosts)} hosts, but SLURM_JOB_NUM_NODES is {nodes}")
    return Placement({}, slurm_world_size(env), "slurm", tuple(hosts))


def launch(user_script: str, args: NeoXArgs, placement: Placement, env: Mapping[str, str]) -> int:
    """Start the ranks where `placement` says, wait, and return the job's exit code."""
    _refuse_nested_start(env)
    folder = run_folder(args)
    log_folder = _log_folder(args)
    if placement.launcher is None:
        return _launch_here(user_script, args, placement, log_folder)
    launcher = find_launcher(placement.launcher)
    if shutil.which(launcher.tool, path=env.get("PATH")) is None:
        raise UserError(
            f"launcher={placement.launcher} needs {launcher.tool}, which is not on PATH. "
            f"Other launchers: {', '.join(name for name in LAUNCHERS if name != placement.launcher)}"
        )
    # A file system that all hosts share is where `save` is; rank 0's host may be another than this one.
    shared = folder.absolute() if folder else Path.cwd()
    with config_file(args.to_resolved(), None if placement.launcher == "pdsh" else shared) as resolved:
        address = _master_address(args, placement, env)
        job = _multi_node_job(user_script, args, placement, env, str(resolved), address)
        _log_kept_back(placement, job, env)
        logger.info(f"starting {placement.describe()}")
        started = time.time()
        whole = LocalJob(
            launcher.command(job),
            [command_environment(placement.launcher, job, env)],
            name=launcher.tool,
            stop_signal=launcher.stop_signal,
            stopped_code=launcher.stopped_code,
            failure_line=launcher.failure_line,
            noted_line=launcher.noted_line,
            failure_signal=launcher.failure_signal,
            settle=launcher.settle,
            grace=launcher.grace,
            **stop_limits(args.values()),
        )
        end = run_local(whole)
    if end.noted:
        end = end._replace(reason=f"{end.reason}; {end.noted[0]}")
    if end.code > 128 and not launcher.waits and folder:
        return await_end(end.code, folder, started)
    return outcome(end.code, folder, started, end if launcher.waits else None)


def _log_folder(args: NeoXArgs) -> Path | None:
    """Where the ranks' output goes: `log_dir` as it is (GPT-NeoX), else `logs` in `save`."""
    if args.logging.log_dir:
        return Path(args.logging.log_dir).absolute()
    return Path(args.checkpoint.save).absolute() / "logs" if args.checkpoint.save else None


def _launch_here(user_script: str, args: NeoXArgs, placement: Placement, log_folder: Path | None) -> int:
    asked = args.launcher.master_port if args.is_set("master_port") else None
    with reserve_port(asked) as port, config_file(args.to_resolved()) as resolved:
        command = [sys.executable, "-u", user_script, "--resolved", str(resolved)]
        job = node_job(
            placement.resources, 0, command, master_addr="127.0.0.1", master_port=port, log_folder=log_folder
        )
        started = time.time()
        end = run_local(replace(job, **stop_limits(args.values())))
    if (folder := run_folder(args)) is not None:
        record_end(folder, started, end)
    return end.code


def command_preview(user_script: str, args: NeoXArgs, placement: Placement, env: Mapping[str, str]) -> str:
    """The command line that `launch` would run, for people; the encoded config is left out."""
    if placement.launcher is None:
        return f"{sys.executable} -u {user_script} --resolved FILE, once per rank"
    known = env.get("MASTER_ADDR") or args.launcher.master_addr
    address = known or placement.hosts[0].rpartition("@")[2]
    job = _multi_node_job(user_script, args, placement, env, "FILE", address)
    return re.sub(r"--(config|resources)=\S+", r"--\1=...", shlex.join(find_launcher(placement.launcher).command(job)))


def _multi_node_job(
    user_script: str, args: NeoXArgs, placement: Placement, env: Mapping[str, str], resolved: str, address: str
) -> MultiNodeJob:
    launcher = args.launcher
    log_folder = _log_folder(args)
    extra = read_environment_files()
    exports, secret = select_exports(with_library_on_path(env), extra)
    return MultiNodeJob(
        resources=placement.resources,
        user_script=user_script,
        resolved_file=resolved,
        config_text=args.to_resolved(),
        python=sys.executable,
        folder=os.getcwd(),
        master_addr=address,
        master_port=_master_port(args, placement, env),
        exports=exports,
        secrets={name: extra[name] for name in secret if name in extra},
        log_folder=str(log_folder) if log_folder else None,
        comment=launcher.comment,
        account=launcher.account,
        in_allocation=None if placement.resources else placement.world_size,
    )


def _log_kept_back(placement: Placement, job: MultiNodeJob, env: Mapping[str, str]) -> None:
    own = job.secrets if placement.launcher == "pdsh" else {}  # the agents read .deepspeed_env themselves
    kept_back = [name for name in select_exports(env, job.secrets)[1] if name not in own]
    if kept_back and placement.launcher != "slurm":  # srun passes its own environment on, unseen
        logger.warning(
            f"not put on the command line for other hosts, where everybody can read it: {', '.join(kept_back)}. "
            "Keep them in ~/.netrc or the tool's own login file there"
            + (", or in .deepspeed_env in your home or this folder there." if placement.launcher == "pdsh" else ".")
        )


def _master_address(args: NeoXArgs, placement: Placement, env: Mapping[str, str]) -> str:
    """An address of the first host that the others can use: as given, else its name, or, where only SLURM or ssh know
    that name, the address that they have for it."""
    host = placement.hosts[0]
    name = host.rpartition("@")[2]
    given = env.get("MASTER_ADDR") or args.launcher.master_addr
    if given:
        return given
    if (address := node_address(name, in_slurm=placement.launcher == "slurm")) is not None:
        return address
    if args.launcher.no_ssh_check:
        raise UserError(f"host {name} does not resolve here: set master_addr to the address of the first host")
    ask = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, "hostname", "-I"]
    answer = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=False)
    addresses = answer.stdout.split()
    if answer.returncode != 0 or not addresses:
        raise UserError(
            f"host {name} does not resolve and `{shlex.join(ask)}` failed ({answer.stderr.strip() or 'no answer'}): "
            "set up key-based ssh, or set master_addr"
        )
    return addresses[0]


def _master_port(args: NeoXArgs, placement: Placement, env: Mapping[str, str]) -> int:
    job = env.get("SLURM_JOB_ID", "")
    if args.is_set("master_port") or not (env.get("MASTER_PORT") or (placement.launcher == "slurm" and job.isdigit())):
        return args.launcher.master_port
    return int(env.get("MASTER_PORT") or job_port(job))


def node_address(node: str, *, in_slurm: bool) -> str | None:
    """The name of a node where it resolves, else SLURM's address for it where that does, else None."""
    for address in (node, *(_slurm_addresses(node) if in_slurm else ())):
        with contextlib.suppress(OSError):
            socket.getaddrinfo(address, None)
            return address
    return None


def _slurm_addresses(node: str) -> list[str]:
    """Where SLURM reaches a node; nothing when it does not say."""
    try:
        address = parse_fields(Slurm().run("scontrol", "--oneliner", "show", "node", node)).get("NodeAddr")
    except SlurmError as error:
        logger.warning(f"{error}")
        return []
    return [address] if address else []


def _refuse_nested_start(env: Mapping[str, str]) -> None:
    """deepy.py starts ranks; started itself once per rank, it would start the whole job many times."""
    many = {
        "torchrun": "TORCHELASTIC_RUN_ID" in env and env.get("WORLD_SIZE", "1") != "1",
        "mpirun": env.get("OMPI_COMM_WORLD_SIZE", "1") != "1" or env.get("MV2_COMM_WORLD_SIZE", "1") != "1",
        "srun": "SLURM_STEP_ID" in env and env.get("SLURM_STEP_NUM_TASKS", "1") != "1",
    }
    for tool, nested in many.items():
        if nested:
            raise UserError(
                f"deepy.py was started by {tool}, once per rank, but it starts the ranks itself: run it once, "
                f"or give the script to {tool} directly: {tool} ... train.py CONF..."
            )
