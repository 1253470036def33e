"""Which rank holds and counts what of the whole model: experts, and sums in which each parameter counts once."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.mpu.sharding import ParamSpec, named_parameters, spec_of
from megatron.mpu.state import ParallelState


def own_experts(part: Tensor, spec: ParamSpec, state: ParallelState) -> Tensor:
    """What this rank holds of a tensor-parallel part [experts/tp, ...], perhaps a view; other parameters come back as
    they are."""
    if not spec.experts or state.ep_size == 1:
        return part
    held = spec.local_shape(state.tp_size, state.ep_size)[0]
    return part.narrow(0, state.ep_rank * held, held)


def is_owned(spec: ParamSpec, state: ParallelState, partitioned: bool = False) -> bool:
    """Whether this rank counts the parameter (its part) in a sum over the ranks of one copy of the model (`sum_owned`).

    Split parameters count on every tensor-parallel rank, replicated ones on the first; experts on every rank of the
    group "expert", others on its first. A tied copy on a later pipeline stage never does, because its original on the
    first stage does. `partitioned`: each data-parallel rank has its own part of everything, and counts that.
    """
    copy_on_later_stage = spec.tied is not None and spec.tied != spec.name and not state.is_first_stage
    once = partitioned or spec.experts or state.ep_rank == 0
    counted = (spec.split_dim is not None or state.tp_rank == 0) and once
    return counted and not copy_on_later_stage


def sum_owned(x: Tensor, state: ParallelState, partitioned: bool = False) -> Tensor:
    """Add up, in place, what the ranks that together hold one copy of the model count (`is_owned`). Collective over
    the groups "model_pipe" and "expert", or "data" if each of its ranks has its own part."""
    for name in ("model_pipe", "data" if partitioned else "expert"):
        if (group := state.group(name)) is not None:
            dist.all_reduce(x, group=group)
    return x


def count_parameters(module: nn.Module, state: ParallelState) -> int:
    """Number of parameters of the whole model, each once, without padding. Collective like `sum_owned`.

    Reads the declarations, so it is right under ZeRO-3 as well, where a parameter's own tensor may be empty.
    """
    specs = [spec_of(local) for _, local in named_parameters(module)]
    count = sum(_real_numel(spec, state) for spec in specs if is_owned(spec, state))
    return int(sum_owned(torch.tensor(count, dtype=torch.int64, device=state.device), state))


def _real_numel(spec: ParamSpec, state: ParallelState) -> int:
    shape = list(spec.shape)
    if spec.split_dim is not None:
        shape[spec.split_dim] = spec.real_size(state.tp_rank, state.tp_size)
    if spec.experts:
        shape[0] //= state.ep_size
    return torch.Size(shape).numel()
