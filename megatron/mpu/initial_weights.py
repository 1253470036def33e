"""The initial value of every parameter, from its declaration and the seed, whatever the layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.mpu.random import stable_seed
from megatron.mpu.sharding import ParamSpec, named_parameters, shard, spec_of
from megatron.mpu.state import ParallelState


@torch.no_grad()
def initialize(module: nn.Module, seed: int, state: ParallelState) -> None:
    """Fill every parameter of a bound module with its initial value.

    A value depends on (seed, canonical or tied name, full shape) only, so no layout and no padding changes it. Each
    parameter is drawn whole in fp32 on the CPU and cut: one full parameter is alive at a time. Experts are drawn one by
    one, each from (seed, name, its number), so a rank draws those that it holds.
    """
    for key, local in named_parameters(module):
        if spec_of(local).experts:
            _draw_experts(local, spec_of(local), key, seed, state)
        else:
            local.copy_(_initial_shard(spec_of(local), key, seed, state))


def first_expert(experts: int, state: ParallelState) -> int:
    """Number of the first of the consecutive experts that this rank holds, of `experts` in all.

    Tensor-parallel rank r holds part r of tp; of that part, rank e of the group "expert" holds part e of ep.
    """
    return (state.tp_rank * state.ep_size + state.ep_rank) * (experts // (state.tp_size * state.ep_size))


def _draw_experts(local: Tensor, spec: ParamSpec, key: str, seed: int, state: ParallelState) -> None:
    first = first_expert(spec.shape[0], state)
    for i, held in enumerate(local):
        expert = torch.empty(spec.shape[1:], dtype=torch.float32)
        spec.init(expert, torch.Generator("cpu").manual_seed(stable_seed(seed, key, first + i)))
        held.copy_(expert)


def _initial_shard(spec: ParamSpec, key: str, seed: int, state: ParallelState) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(stable_seed(seed, key))
    full = torch.empty(spec.shape, dtype=torch.float32)
    spec.init(full, generator)
    return shard(full, spec, state.tp_rank, state.tp_size)
