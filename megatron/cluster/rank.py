"""What a rank does to its environment before anything of torch is imported, however it was started."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import MutableMapping, Sequence

from megatron.cluster.devices import choose_accelerator
from megatron.cluster.launch import node_address
from megatron.cluster.launchers import expand_nodelist, job_port

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux
_OF_MPIRUN = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "MPI_LOCALRANKID")


def prepare_rank(env: MutableMapping[str, str] = os.environ) -> None:
    """Say where there is no GPU, where the ranks of an `srun python train.py` meet, and what torch and gloo leave to
    their users."""
    choose_accelerator(env)
    set_rendezvous(env)
    if env.get("DS_ACCELERATOR") != "cpu" and not any(name in env for name in _ALLOCATOR):
        # Packed documents and experts ask for tensors of new sizes at every step; without it each leaves a hole.
        env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if "GLOO_SOCKET_IFNAME" not in env and (asked := env.get("NCCL_SOCKET_IFNAME")):
        interface = gloo_interface(asked, usable_interfaces())
        env.update({"GLOO_SOCKET_IFNAME": interface} if interface else {})


def set_rendezvous(env: MutableMapping[str, str]) -> None:
    """The host of rank 0 and the job's port, for the tasks of a SLURM step or of an mpirun in a SLURM job, where the
    environment has none."""
    job, by_mpi = env.get("SLURM_JOB_ID", ""), any(name in env for name in _OF_MPIRUN)
    if not job.isdigit() or "TORCHELASTIC_RUN_ID" in env or not (by_mpi or env.get("SLURM_STEP_NUM_TASKS", "1") != "1"):
        return
    # Open MPI starts its daemons on all hosts but the first as a step of their own.
    nodes = env.get("SLURM_JOB_NODELIST") if by_mpi else env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    hosts = expand_nodelist(nodes) if nodes else []
    if "MASTER_ADDR" not in env and len(hosts) > 1:
        env["MASTER_ADDR"] = node_address(hosts[0], in_slurm=True) or hosts[0]
    env.setdefault("MASTER_PORT", str(job_port(job)))


def gloo_interface(asked: str, present: Sequence[str]) -> str | None:
    """The interface for gloo where NCCL was told one (`asked`), of those that are `present`: gloo would take that of
    the host's name, which other nodes may not reach. NCCL takes the starts of names, gloo whole ones."""
    if asked.startswith("^"):  # all but these
        return None
    exact, names = asked.startswith("="), asked.removeprefix("=").split(",")
    return next((one for name in names for one in present if one == name or (one.startswith(name) and not exact)), None)


def usable_interfaces() -> list[str]:
    """The network interfaces of this machine that have an address (IPv4)."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                fcntl.ioctl(asking.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()))
                found.append(name)
            except OSError:
                pass
    return sorted(found)
