"""What this machine has, found without importing torch: visible GPUs, usable CPU cores, a free port, time."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from megatron.errors import UserError

_NVIDIA_PROC = Path("/proc/driver/nvidia/gpus")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def count_gpus(env: Mapping[str, str]) -> int:
    """GPUs that a process with environment `env` may use: `CUDA_VISIBLE_DEVICES`, else the driver's list."""
    if env.get("DS_ACCELERATOR", "").lower() == "cpu":
        return 0
    present = len(list(_NVIDIA_PROC.iterdir())) if _NVIDIA_PROC.is_dir() else _count_with_nvidia_smi()
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None or present == 0:
        return present
    count = 0
    for entry in visible.split(","):  # CUDA's rule: the first invalid entry hides itself and all after it
        if not entry.strip() or entry.strip() == "-1":
            break
        count += 1
    return count


def end_of_job(env: Mapping[str, str] = os.environ) -> float | None:
    """When the scheduler ends the job, in seconds since the epoch; None when it does not say (SLURM 22.05)."""
    end = env.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() else None


def choose_accelerator(env: MutableMapping[str, str] = os.environ) -> None:
    """Tell DeepSpeed that there is no GPU, before it is imported: it looks then, and warns on every rank otherwise."""
    if count_gpus(env) == 0:
        env.setdefault("DS_ACCELERATOR", "cpu")


def _count_with_nvidia_smi() -> int:
    """GPUs listed by `nvidia-smi -L`; containers may hide /proc/driver/nvidia. 0 without the tool or the driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0


def count_cores() -> int:
    """CPU cores this process may use: affinity mask and, in a container, the cgroup's quota. At least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if _CPU_QUOTA.is_file():
        quota, _, period = _CPU_QUOTA.read_text().strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)


@contextlib.contextmanager
def reserve_port(port: int | None) -> Iterator[int]:
    """Keep TCP port `port` of this machine (None: a free one) from other programs until rank 0 listens on it.

    The socket is bound but does not listen: the system then gives the port to nobody who asks for any free one, while
    rank 0, which names it and allows reuse as torch does, gets it at once.

    Raises:
        UserError: `port` cannot be listened on here.
    """
    if port is not None and not 0 < port < 65536:
        raise UserError(f"master_port={port} is not a port number (1 to 65535): leave it unset to get a free one")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", port or 0))
        except OSError as error:
            if port is None:
                raise
            raise UserError(
                f"master_port={port} cannot be used ({error.strerror}): leave it unset to get a free one"
            ) from None
        yield int(holder.getsockname()[1])
