"""L2 norms of single parameters or gradients over the whole model, whatever the layout (`log_grad_norm`, ...)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.mpu.owned import is_owned, sum_owned
from megatron.mpu.sharding import spec_of
from megatron.mpu.state import ParallelState


def all_names(names: Iterable[str], state: ParallelState) -> list[str]:
    """Canonical names of the whole model in one order, from those of each stage. Collective over all stages."""
    mine = list(names)
    group = state.group("pipe")
    if group is None:
        return mine
    stages: list[list[str]] = [[] for _ in range(state.pp_size)]
    dist.all_gather_object(stages, mine, group=group)
    return list(dict.fromkeys(name for stage in stages for name in stage))


@torch.no_grad()
def named_norms(
    pieces: Iterable[tuple[Tensor, Parameter]], names: list[str], state: ParallelState, *, partitioned: bool
) -> dict[str, Tensor]:
    """canonical name -> L2 norm, 0-dim fp32, the same on every rank. Collective over all ranks.

    Args:
        pieces: this rank's tensors, each with the parameter it belongs to.
        names: `all_names` of the model.
        partitioned: each data-parallel rank holds its own part of every tensor, rather than all of it.
    """
    index = {name: i for i, name in enumerate(names)}
    squares = torch.zeros(len(names), device=state.device)
    for tensor, p in pieces:
        spec = spec_of(p)
        if is_owned(spec, state):
            squares[index[spec.key]] += torch.linalg.vector_norm(tensor, dtype=torch.float32).square().to(state.device)
    sum_owned(squares, state)
    if partitioned and (group := state.group("data")) is not None:
        dist.all_reduce(squares, group=group)
    return dict(zip(names, squares.sqrt().unbind(), strict=True))
