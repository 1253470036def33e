"""How many parameters a part of the network has, from its own declarations: for parts that no formula knows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron.mpu.sharding import spec_of
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.block_sizes import Size


def size_of(build: Callable[[ParallelState], nn.Module]) -> Size:
    """The size of what `build(state)` makes, built on torch's meta device, so without memory."""
    state = ParallelState.single(torch.device("meta"))
    split = replicated = experts = 0
    for parameter in build(state).parameters():
        spec = spec_of(parameter)
        count = torch.Size(spec.shape).numel()
        if spec.split_dim is None:
            replicated += count
        else:
            split += count
            experts += count * spec.experts
    return Size(split, replicated, experts)
