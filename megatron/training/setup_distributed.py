"""This process among the others: its rank, its device, torch.distributed. Reads the environment."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.errors import UserError
from megatron.log import DETAIL, get_logger
from megatron.mpu.state import HOST_SECONDS
from megatron.mpu.topology import RankInfo, local_size, ranks_from_environment
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.rules_parallel import MOST_SECONDS
from megatron.training import flight_recorder
from megatron.training.time_limits import TimeLimits

logger = get_logger(__name__)

OTHER_FILES = 500  # of the device's library, data and logs
_MINUTES = "DEEPSPEED_TIMEOUT"


def find_rank(paths: list[str], overrides: list[str]) -> RankInfo:
    """This process's rank, from the variables of whoever started it. `paths`, `overrides`: its own configuration, empty
    when the launcher resolved it."""
    return ranks_from_environment(os.environ, launcher_preference(paths, overrides) if paths else None)


def launcher_preference(paths: list[str], overrides: list[str]) -> str | None:
    """Whose variables name the rank, as far as the configuration decides it: "mpi", "slurm" or None."""
    try:
        launcher = NeoXArgs.from_files(paths, overrides).launcher
    except UserError:
        return None  # reported once the ranks have met, so that it is reported once
    return "mpi" if launcher.deepspeed_mpi else "slurm" if launcher.deepspeed_slurm else None


def raise_file_limit(world_size: int) -> None:
    """Let this process have as many open files as it may: `ParallelState.host` has a socket for each other rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != resource.RLIM_INFINITY and soft < (needed := 2 * world_size + OTHER_FILES):
        logger.warning(
            f"a process may have {soft} open files here (ulimit -Hn); {world_size} ranks may need {needed}: "
            "ask for more (LimitNOFILE of slurmd or sshd, or limits.conf)"
        )


def warn_of_blocking(env: Mapping[str, str]) -> None:
    """Of a variable in old scripts, with which the host waits for each of NCCL's operations."""
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if env.get(name, "0") not in ("0", ""):
            logger.warning(
                f"{name}={env[name]}: the host waits for every collective operation, none overlaps with computation, "
                "and torch no longer ends a process whose operation hangs. Unset it"
            )


def open_store(info: RankInfo) -> dist.Store:
    """The TCP store at which the ranks meet: hosted by rank 0, or by torchrun's agent on the master's port.

    Raises:
        UserError: the job has several machines and no address.
    """
    address, here = os.environ.get("MASTER_ADDR"), local_size(os.environ)
    if address is None and here is not None and info.world_size > here:
        raise UserError(
            f"MASTER_ADDR is not set, and {here} of the {info.world_size} ranks are on this machine: give all ranks "
            "the address of the machine of rank 0 (mpirun -x MASTER_ADDR=HOST; MASTER_PORT, if 29500 is in use there)"
        )
    return dist.TCPStore(
        address or "127.0.0.1",
        int(os.environ.get("MASTER_PORT", "29500" if info.world_size > 1 else "0")),
        info.world_size,
        is_master=info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") != "True",
        timeout=timedelta(minutes=10),
        wait_for_workers=False,
    )


def init_distributed(args: NeoXArgs, info: RankInfo, device: torch.device, store: dist.Store | None) -> None:
    """Initialise torch.distributed and, unless `engine: native`, DeepSpeed's view of it. `nccl` without a GPU becomes
    gloo, with one line."""
    backend = args.parallel.distributed_backend
    if backend == "nccl" and device.type == "cpu":
        logger.log(DETAIL, "no GPU: distributed_backend nccl becomes gloo")
        backend = "gloo"
    for name, value in (("RANK", info.rank), ("WORLD_SIZE", info.world_size)):
        os.environ.setdefault(name, str(value))
    raise_file_limit(info.world_size)
    if backend == "nccl" and info.rank == 0:
        warn_of_blocking(os.environ)
    folder = args.checkpoint.save or args.logging.log_dir
    os.environ.update(flight_recorder.settings(os.environ, folder))
    if folder is not None and backend == "nccl" and info.rank == 0:
        flight_recorder.prefix_of(folder).parent.mkdir(parents=True, exist_ok=True)
    if not dist.is_initialized():
        timeout = timedelta(seconds=time_limits(args).host)
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout)
    if args.optimizer.engine == "deepspeed":
        if not os.environ.get(_MINUTES, "unset").strip():
            del os.environ[_MINUTES]  # DeepSpeed takes an empty one for a number
        from megatron.training.setup_deepspeed import init_deepspeed

        init_deepspeed(device)


def time_limits(args: NeoXArgs) -> TimeLimits:
    """For how long the ranks of this run wait for each other.

    Raises:
        UserError: DEEPSPEED_TIMEOUT is no number of minutes that DeepSpeed would read.
    """
    seconds, written = args.parallel.distributed_timeout, os.environ.get(_MINUTES, "").strip()
    if written:
        minutes = int(written) if written.isdecimal() else 0
        if not 0 < 60 * minutes < MOST_SECONDS:
            raise UserError(
                f"{_MINUTES}={written} in the environment: expected whole minutes, at least 1 and at most "
                f"{MOST_SECONDS // 60:.0f}; unset it; the key distributed_timeout, in seconds, does the same"
            )
        seconds = 60.0 * minutes if seconds is None else seconds
    seconds = HOST_SECONDS if seconds is None else seconds
    return TimeLimits(seconds, args.parallel.collective_timeout, args.launcher.watchdog_seconds)


def leave_job() -> None:
    """Leave the job in order; a rank that exits with a live group may be reported as aborted."""
    if dist.is_initialized():
        dist.destroy_process_group()
