"""Rank arithmetic: named parallel axes, their groups, and a process's own rank. No torch in here.

A topology is `np.arange(world).reshape(axis sizes)`; every group of ranks is a slice of that array.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from megatron.errors import UserError, nearest


class Topology:
    """How `world_size` ranks are laid out over named axes, outermost (slowest varying) first.

    >>> topology = Topology({"pipe": 2, "data": 1, "model": 2})
    >>> topology.coord(3)
    {'pipe': 1, 'data': 0, 'model': 1}
    >>> topology.groups("model")
    [[0, 1], [2, 3]]
    """

    def __init__(self, axes: Mapping[str, int]) -> None:
        """`axes` maps a name to its size. Raises `UserError` when a size is not a positive integer."""
        for name, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise UserError(f"the parallel axis {name!r} has size {size!r}; it must be an integer of at least 1")
        self.axes: dict[str, int] = {name: int(size) for name, size in axes.items()}
        self.world_size: int = math.prod(self.axes.values())
        self._ranks = np.arange(self.world_size).reshape(tuple(self.axes.values()))

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`; 1 for an axis this topology does not have."""
        return self.axes.get(axis, 1)

    def coord(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on every axis. Raises `UserError` for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise UserError(f"rank {rank} does not exist: {self} has ranks 0 to {self.world_size - 1}")
        return {name: int(i) for name, i in zip(self.axes, np.unravel_index(rank, self._ranks.shape), strict=True)}

    def rank(self, **coord: int) -> int:
        """The rank at a full set of coordinates, e.g. `rank(pipe=1, data=0, model=1)`."""
        self._check(coord)
        missing = [name for name in self.axes if name not in coord]
        if missing:
            raise ValueError(f"no coordinate for axis {', '.join(missing)} of {self}")
        for name, i in coord.items():
            if not 0 <= i < self.axes[name]:
                raise ValueError(f"{name}={i} is outside {self}")
        return int(self._ranks[tuple(coord[name] for name in self.axes)])

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups whose members differ only in `axes`, each with its ranks ascending; together they cover the world.

        `groups("pipe", "model")` therefore lists, for every data-parallel index, all ranks that hold one model.
        An axis the topology does not have counts as an axis of size 1.
        """
        chosen = [i for i, name in enumerate(self.axes) if name in axes]
        others = [i for i in range(len(self.axes)) if i not in chosen]
        size = math.prod(self._ranks.shape[i] for i in chosen)
        return self._ranks.transpose(others + chosen).reshape(-1, size).tolist()

    def refined(self, axis: str, parts: Mapping[str, int]) -> Topology:
        """The same ranks with `axis` seen as several axes, outermost first, whose sizes multiply to its own.

        >>> Topology({"data": 4, "model": 2}).refined("data", {"expert_data": 2, "expert": 2}).groups("expert")
        [[0, 2], [1, 3], [4, 6], [5, 7]]
        """
        if math.prod(parts.values()) != self.size(axis):
            raise ValueError(f"the sizes {dict(parts)} do not multiply to {axis}={self.size(axis)}")
        axes: dict[str, int] = {}
        for name, size in self.axes.items():
            axes.update(parts if name == axis else {name: size})
        return Topology(axes)

    def _check(self, names: Mapping[str, int]) -> None:
        for name in names:
            if name not in self.axes:
                raise ValueError(f"{self} has no axis {name!r}.{nearest(name, list(self.axes))}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and list(self.axes.items()) == list(other.axes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.axes.items()))

    def __repr__(self) -> str:
        return f"Topology({', '.join(f'{name}={size}' for name, size in self.axes.items())})"


class RankInfo(NamedTuple):
    """What a launcher gave this process: its rank, its rank on this machine, and the number of ranks."""

    rank: int
    local_rank: int
    world_size: int


# Per launcher: the variables for rank, local rank and world size. The first launcher whose rank variable is set wins.
# MPI comes before SLURM because under `mpirun` in an allocation SLURM_PROCID belongs to the daemon that started us.
_LAUNCHERS: dict[str, tuple[str, str, str]] = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "OpenMPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
}


def ranks_from_environment(env: Mapping[str, str], prefer: str | None = None) -> RankInfo:
    """This process's rank, local rank and world size from what torchrun, MPI or SLURM put into `env`.

    `prefer`: "mpi" (`deepspeed_mpi`) or "slurm" (`deepspeed_slurm`) lets that one's variables win over a RANK that was
    left in the environment, where they are set. A process that torchrun itself started keeps torchrun's.

    Without any launcher's variables this is the only process: (0, 0, 1). Raises `UserError` naming the variables when
    a launcher is recognised but its variables are incomplete or contradict each other.
    """
    names = list(_LAUNCHERS)
    if prefer is not None and "TORCHELASTIC_RUN_ID" not in env:
        if prefer == "slurm" and "SLURM_PROCID" in env:
            return _slurm_rank(env)
        names.sort(key=lambda name: name == "torchrun")  # after MPI's
    for launcher in names:
        rank, local_rank, world = _LAUNCHERS[launcher]
        if rank not in env:
            continue
        if launcher == "MPICH" and local_rank not in env and "SLURM_PROCID" in env:
            continue  # srun --mpi=pmi2 sets PMI_RANK as well, but only SLURM's variables have the local rank
        absent = [name for name in (local_rank, world) if name not in env]
        if absent:
            raise UserError(
                f"{rank} is set (a start by {launcher}) but {' and '.join(absent)} "
                f"{'is' if len(absent) == 1 else 'are'} not; set {rank}, {local_rank} and {world}, or unset {rank}"
            )
        return _checked(launcher, _int(env, rank), _int(env, local_rank), _int(env, world))
    if "SLURM_PROCID" in env:
        return _slurm_rank(env)
    return RankInfo(0, 0, 1)


def _slurm_rank(env: Mapping[str, str]) -> RankInfo:
    if "SLURM_LOCALID" not in env:
        raise UserError("SLURM_PROCID is set but SLURM_LOCALID is not; start the processes with srun")
    return _checked("SLURM", _int(env, "SLURM_PROCID"), _int(env, "SLURM_LOCALID"), slurm_world_size(env))


def slurm_world_size(env: Mapping[str, str]) -> int:
    """Number of tasks of a SLURM job, from whichever variables the job's options made SLURM set.

    With `--ntasks-per-node` alone there is no SLURM_NTASKS. Raises `UserError` naming the variables it looked for.
    """
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"):
        if name in env:
            return _int(env, name)
    nodes = next((name for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES") if name in env), None)
    if nodes and "SLURM_NTASKS_PER_NODE" in env:
        return _int(env, nodes) * _int(env, "SLURM_NTASKS_PER_NODE")
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in env:
            return sum(tasks_per_node(env[name], name))
    raise UserError(
        "cannot tell how many tasks this SLURM job has: none of SLURM_NTASKS, SLURM_NNODES with SLURM_NTASKS_PER_NODE, "
        "or SLURM_TASKS_PER_NODE is set; give sbatch or srun --ntasks or --ntasks-per-node"
    )


def tasks_per_node(text: str, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """SLURM's compressed list of tasks on each node: `"4(x2),2"` is `[4, 4, 2]`. `name` is for the error message."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", item)
        if match is None:
            raise UserError(f"{name}={text!r} is not a list like '4(x2),2'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


# Variables with the number of ranks on this machine.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def local_size(env: Mapping[str, str]) -> int | None:
    """Ranks of the job on this machine, as far as torchrun or MPI says."""
    return next((_int(env, name) for name in _LOCAL_SIZES if name in env), None)


def _int(env: Mapping[str, str], name: str) -> int:
    if re.fullmatch(r"\s*\d+\s*", env[name]) is None:
        raise UserError(f"the environment variable {name}={env[name]!r} is not a whole number")
    return int(env[name])


def _checked(launcher: str, rank: int, local_rank: int, world_size: int) -> RankInfo:
    if not local_rank <= rank < world_size:
        raise UserError(
            f"{launcher}'s variables contradict each other: rank {rank}, local rank {local_rank}, "
            f"world size {world_size}"
        )
    return RankInfo(rank, local_rank, world_size)
