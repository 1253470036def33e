"""Which rank holds and counts what of the whole model: experts, and sums in which each parameter counts once."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.mpu.sharding import ParamSpec, named_parameters, spec_of
from megatron.mpu.state import ParallelState


def own_experts(part: Tensor, spec: ParamSpec, state: ParallelState) -> Tensor:
    """What this rank holds of a tensor-parallel part [experts/tp, ...]; other parameters are returned as they are.

    The inverse of `gather_experts`; may be a view.
    """
    if not spec.experts or state.ep_size == 1:
        return part
    held = spec.local_shape(state.tp_size, state.ep_size)[0]
    return part.narrow(0, state.ep_rank * held, held)


def gather_experts(local: Tensor, spec: ParamSpec, state: ParallelState, needed: bool = True) -> Tensor:
    """The whole tensor-parallel part [experts/tp, ...] from the ranks of the group "expert". Collective over it.

    It comes rank by rank and is put together in the host's memory, so that a device holds another rank's experts
    next to its own at most. A rank on which it is not `needed` gets its own back.
    """
    group = state.group("expert")
    if not spec.experts or group is None:
        return local
    held = local.shape[0]
    whole = torch.empty(spec.local_shape(state.tp_size) if needed else 0, dtype=local.dtype)
    for rank in range(state.ep_size):
        part = local.contiguous() if rank == state.ep_rank else torch.empty_like(local)
        dist.broadcast(part, src=dist.get_global_rank(group, rank), group=group)
        if needed:
            whole[rank * held : (rank + 1) * held] = part
    return whole if needed else local


def is_owned(spec: ParamSpec, state: ParallelState) -> bool:
    """Whether this rank counts the parameter (its part) in a sum over the ranks of one copy of the model (`sum_owned`).

    Split parameters count on every tensor-parallel rank, replicated ones on the first; experts on every rank of the
    group "expert", others on its first. A tied copy on a later pipeline stage never does, because its original on the
    first stage does.
    """
    copy_on_later_stage = spec.tied is not None and spec.tied != spec.name and not state.is_first_stage
    counted = (spec.split_dim is not None or state.tp_rank == 0) and (spec.experts or state.ep_rank == 0)
    return counted and not copy_on_later_stage


def sum_owned(x: Tensor, state: ParallelState) -> Tensor:
    """Add up, in place, what the ranks that together hold one copy of the model count (`is_owned`). Collective over
    the groups "model_pipe" and "expert"."""
    for name in ("model_pipe", "expert"):
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
