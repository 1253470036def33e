"""L2 norms of single parameters or gradients over the whole model, whatever the layout (`log_grad_norm`, ...)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.checkpoint.agreement import gather_over_stages
from megatron.mpu.owned import is_owned, sum_owned
from megatron.mpu.sharding import spec_of
from megatron.mpu.state import ParallelState


def all_names(names: Iterable[str], state: ParallelState) -> list[str]:
    """Canonical names of the whole model in one order, from those of each stage. Collective over all stages."""
    return list(dict.fromkeys(name for stage in gather_over_stages(list(names), state) for name in stage))


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
        if is_owned(spec, state, partitioned):
            squares[index[spec.key]] += torch.linalg.vector_norm(tensor, dtype=torch.float32).square().to(state.device)
    sum_owned(squares, state, partitioned)
    return dict(zip(names, squares.sqrt().unbind(), strict=True))
