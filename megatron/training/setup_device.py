"""The GPU of this rank, that no other rank has the same, and what its machine lacks. Reads the environment."""

from __future__ import annotations

import os
import shutil
import socket
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.checkpoint.agreement import gather
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import RankInfo

logger = get_logger(__name__)

FEWEST_CORES = 4  # for launching, the backward pass, loading, NCCL's threads


def pick_device(info: RankInfo) -> torch.device:
    """The GPU of this rank's local number, or the only one that it sees; the CPU when there is none or
    `DS_ACCELERATOR=cpu` asks for it. DeepSpeed is told by `LOCAL_RANK`, which it takes for the number of the GPU.

    Raises:
        UserError: more ranks on this machine than GPUs.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        os.environ.setdefault("LOCAL_RANK", str(info.local_rank))  # DeepSpeed's pipeline module reads it
        return torch.device("cpu")
    index, present = info.local_rank, torch.cuda.device_count()
    if present == 1:
        index = (
            0  # SLURM's --gpus-per-task and --gpu-bind, or a script, show each rank one: `refuse_shared_gpus` follows
        )
    if index >= present:
        raise UserError(
            f"num_gpus: rank {index} of this machine has no GPU, there are {present}. "
            "Start fewer ranks, or run on the CPU with DS_ACCELERATOR=cpu in the environment"
        )
    os.environ["LOCAL_RANK"] = str(index)
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = str(index)  # DeepSpeed wants both to be the same
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def refuse_shared_gpus(state: ParallelState) -> None:
    """Raise `UserError` on every rank when two ranks have the same GPU: NCCL would say so after minutes, or hang.

    Collective over all ranks.
    """
    uuid = str(torch.cuda.get_device_properties(state.device).uuid) if state.device.type == "cuda" else None
    places = gather((socket.gethostname(), uuid), state)
    if problem := shared_gpu(places):
        raise UserError(problem)


def shared_gpu(places: Sequence[tuple[str, str | None]]) -> str | None:
    """What is wrong when two ranks have one GPU. `places`: host and UUID of the GPU of each rank (None: a CPU)."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, (host, uuid) in enumerate(places):
        if uuid is not None:
            ranks.setdefault((host, uuid), []).append(rank)
    shared = [(place, members) for place, members in ranks.items() if len(members) > 1]
    if not shared:
        return None
    (host, uuid), members = shared[0]
    on_host = sum(place[0] == host for place in places)
    return (
        f"ranks {', '.join(map(str, members))} use the same GPU of {host} ({uuid}); {on_host} ranks run there. Start "
        "one rank per GPU (num_gpus, srun --ntasks-per-node, torchrun --nproc-per-node), and show each rank all GPUs "
        "of its machine or one of its own (CUDA_VISIBLE_DEVICES, srun --gpus-per-task=1)"
    )


def warn_of_few_cores(state: ParallelState) -> None:
    """Rank 0 warns when it feeds a GPU from a core or two, as a task of SLURM does unless it asks for more."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if state.rank == 0 and state.device.type == "cuda" and cores < FEWEST_CORES:
        logger.warning(
            f"this rank may use {cores} of {os.cpu_count()} cores for launching, loading data and NCCL: a step may be "
            "slow. Ask for more (sbatch and srun --cpus-per-task)"
        )


def can_compile(asked: bool | None, state: ParallelState) -> bool:
    """Whether every rank's machine has what torch.compile needs: on a GPU it builds small programs in C at the first
    step, on a CPU large ones in C++. The same answer on all ranks, and a warning of rank 0. Collective over all ranks.

    Args:
        asked: `torch_compile`. Raises `UserError` when it is true and cannot be.
    """
    lack = next(filter(None, gather(_lacks_compiler(state.device.type), state)), None)
    if lack is None:
        return True
    if asked:
        raise UserError(f"torch_compile: true needs a compiler, and {lack}")
    if state.rank == 0:
        logger.warning(f"torch.compile is off, which makes steps slower: it needs a compiler, and {lack}")
    return False


def _lacks_compiler(device: str) -> str | None:
    variable, usual = ("CXX", ("g++",)) if device == "cpu" else ("CC", ("gcc", "clang"))
    asked = os.environ.get(variable)
    if not any(map(shutil.which, [asked.split()[0]] if asked and asked.strip() else usual)):
        what = f"no {asked} ({variable})" if asked else f"no {' or '.join(usual)} (or {variable}=PATH)"
        return f"{socket.gethostname()} has {what}"
    folders = [sysconfig.get_path("include", "posix_prefix")]
    folders += [part for name in ("CPATH", "C_INCLUDE_PATH") for part in os.environ.get(name, "").split(":") if part]
    if not any(Path(folder, "Python.h").is_file() for folder in folders):
        return f"{socket.gethostname()} has no {folders[0]}/Python.h (python3-dev, python3-devel)"
    return None
