"""`ParallelState`: which shard of the work this rank does, and the process groups to do it with.

Built once and passed as an argument (`state`); there is no module-level state anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.errors import UserError
from megatron.mpu.doing import Doing
from megatron.mpu.topology import Topology

# How long a rank waits on the host for the others, unless somebody says otherwise.
HOST_SECONDS = 7200.0

# Every process group a rank may ask for, and the axes along which its members differ.
GROUP_AXES: dict[str, tuple[str, ...]] = {
    "model": ("model",),
    "data": ("data",),
    "pipe": ("pipe",),
    "model_pipe": ("pipe", "model"),
    "expert": ("expert",),
    "expert_data": ("expert_data",),
}


@dataclass(frozen=True, eq=False)
class ParallelState:
    """One rank's place in the topology. Compared by identity; a deep copy is the same object.

    `sequence_parallel` is what takes effect: it is False when there is only one tensor-parallel rank.
    The ranks and sizes are plain integers, set once, because compiled code reads them.

    `ep_size` consecutive ranks of a data-parallel group share the experts of mixture-of-experts layers: they are the
    group "expert". The ranks of the data-parallel group that hold the same experts are the group "expert_data".

    `groups` has besides those what had to be made for DeepSpeed (training/setup_deepspeed.py): limits reach them all.

    `host` joins all ranks of the world over gloo, with a limit that is long: for objects and other CPU tensors, and for
    waiting until another rank has done what takes long. None when there is one rank. `doing`: what those that wait
    there are told.
    """

    topology: Topology
    rank: int
    device: torch.device
    sequence_parallel: bool = False
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    ep_size: int = 1
    host: dist.ProcessGroup | None = None
    doing: Doing = field(default_factory=Doing)
    tp_rank: int = field(init=False)
    tp_size: int = field(init=False)
    dp_rank: int = field(init=False)
    dp_size: int = field(init=False)
    pp_rank: int = field(init=False)
    pp_size: int = field(init=False)
    ep_rank: int = field(init=False)

    def __post_init__(self) -> None:
        coord = self.topology.coord(self.rank)
        derived: dict[str, object] = {"device": torch.device(self.device)}
        for short, axis in (("tp", "model"), ("dp", "data"), ("pp", "pipe")):
            derived[f"{short}_rank"] = coord.get(axis, 0)
            derived[f"{short}_size"] = self.topology.size(axis)
        with_experts(self.topology, self.ep_size)
        derived["ep_rank"] = coord.get("data", 0) % self.ep_size
        derived["sequence_parallel"] = self.sequence_parallel and self.topology.size("model") > 1
        for name, value in derived.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head and computes the loss."""
        return self.pp_rank == self.pp_size - 1

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The process group of this rank called so in GROUP_AXES; None if it is alone in it."""
        if name not in GROUP_AXES:
            raise ValueError(f"no group {name!r}; there are {', '.join(GROUP_AXES)}")
        return self.groups.get(name)

    @classmethod
    def build(
        cls,
        topology: Topology,
        rank: int,
        device: torch.device | str,
        sequence_parallel: bool = False,
        ep_size: int = 1,
        timeout: timedelta | None = None,
        host_timeout: timedelta = timedelta(seconds=HOST_SECONDS),
    ) -> ParallelState:
        """Make the process groups. torch.distributed must be initialised; collective over all ranks of the world.

        Args:
            timeout: of collectives on the device; None: torch's default.
            host_timeout: of those of `host`.
        """
        if dist.get_world_size() != topology.world_size:
            raise ValueError(f"{topology} needs {topology.world_size} ranks, there are {dist.get_world_size()}")
        groups: dict[str, dist.ProcessGroup] = {}
        made: dict[tuple[int, ...], Any] = {tuple(range(topology.world_size)): dist.group.WORLD}
        for name, lists in rank_lists(topology, ep_size).items():
            # Every rank must take part in making every group, in the same order. The same ranks are one group: each
            # one has a communicator of the device's library, with buffers on every GPU.
            for ranks in filter(lambda ranks: len(ranks) > 1, lists):
                made[ranks] = made.get(ranks) or dist.new_group(ranks, timeout)
                if rank in ranks:
                    groups[name] = made[ranks]
        host = dist.new_group(backend="gloo", timeout=host_timeout) if topology.world_size > 1 else None
        return cls(topology, rank, torch.device(device), sequence_parallel, groups, ep_size, host)

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> ParallelState:
        """The state of a process that is alone; needs no torch.distributed."""
        return cls(Topology({"pipe": 1, "data": 1, "model": 1}), 0, torch.device(device))

    def __deepcopy__(self, memo: dict[int, object]) -> ParallelState:
        return self  # a copied module stays on the same ranks; process groups cannot be copied


def rank_lists(topology: Topology, ep_size: int) -> dict[str, list[tuple[int, ...]]]:
    """The ranks, ascending, of all groups of each name in GROUP_AXES."""
    finer = with_experts(topology, ep_size)
    return {
        name: [tuple(ranks) for ranks in (finer if name.startswith("expert") else topology).groups(*axes)]
        for name, axes in GROUP_AXES.items()
    }


def with_experts(topology: Topology, ep_size: int) -> Topology:
    """The topology with its axis "data" seen as "expert_data" x "expert". Raises `UserError` if that cannot be."""
    data = topology.size("data")
    if ep_size < 1 or data % ep_size:
        raise UserError(f"expert_parallel_size: {ep_size} does not divide the {data} data-parallel ranks")
    return topology.refined("data", {"expert_data": data // ep_size, "expert": ep_size})
