"""This process among the others: its rank, its device, torch.distributed. Reads the environment."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.errors import UserError
from megatron.log import get_logger
from megatron.mpu.topology import RankInfo, ranks_from_environment
from megatron.neox_arguments import NeoXArgs
from megatron.training.setup_deepspeed import init_deepspeed
from megatron.training.watchdog import collective_timeout

logger = get_logger(__name__)


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


def open_store(info: RankInfo) -> dist.Store:
    """The TCP store at which the ranks meet: hosted by rank 0, or by torchrun's agent on the master's port."""
    return dist.TCPStore(
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ.get("MASTER_PORT", "29500" if info.world_size > 1 else "0")),
        info.world_size,
        is_master=info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") != "True",
        timeout=timedelta(minutes=10),
        wait_for_workers=False,
    )


def pick_device(info: RankInfo) -> torch.device:
    """The GPU of this rank's local number, or the CPU when there is none or `DS_ACCELERATOR=cpu` asks for it.

    Raises:
        UserError: more ranks on this machine than GPUs.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if info.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"num_gpus: rank {info.local_rank} of this machine has no GPU, there are {torch.cuda.device_count()}. "
            "Start fewer ranks, or run on the CPU with DS_ACCELERATOR=cpu in the environment"
        )
    device = torch.device("cuda", info.local_rank)
    torch.cuda.set_device(device)
    return device


def init_distributed(args: NeoXArgs, info: RankInfo, device: torch.device, store: dist.Store | None) -> None:
    """Initialise torch.distributed and DeepSpeed's view of it. `nccl` without a GPU becomes gloo, with one line."""
    backend = args.parallel.distributed_backend
    if backend == "nccl" and device.type == "cpu":
        logger.info("no GPU: distributed_backend nccl becomes gloo")
        backend = "gloo"
    os.environ.setdefault("LOCAL_RANK", str(info.local_rank))  # DeepSpeed's pipeline module reads it
    for name, value in (("RANK", info.rank), ("WORLD_SIZE", info.world_size)):
        os.environ.setdefault(name, str(value))
    if not dist.is_initialized():
        timeout = collective_timeout(args.launcher.watchdog_seconds)
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout)
    init_deepspeed(device)


def leave_job() -> None:
    """Leave the job in order; a rank that exits with a live group may be reported as aborted."""
    if dist.is_initialized():
        dist.destroy_process_group()
