"""RMSNorm over a width that tensor-parallel ranks share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.mpu import sharding
from megatron.mpu.collectives import enter_tensor_parallel, leave_tensor_parallel
from megatron.mpu.sharding import ParamSpec
from megatron.mpu.state import ParallelState


class SplitRMSNorm(nn.Module):
    """RMSNorm over a width that is split over tensor-parallel ranks: [t, width/tp] -> [t, width/tp].

    The mean of squares is taken over the whole width, so the result does not depend on the layout (the SLURM fork of
    GPT-NeoX normalises each rank's part by itself). `scale` [width/tp] is split like its input.
    """

    def __init__(self, width: int, *, eps: float, state: ParallelState) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.state = state
        self.scale = sharding.parameter(ParamSpec(shape=(width,), init=sharding.ones, split_dim=0), state)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = wide.square().sum(-1)
        # Leaving and entering is an all-reduce in both directions, with and without sequence parallelism.
        squares = enter_tensor_parallel(leave_tensor_parallel(squares, self.state), self.state)
        return (wide * torch.rsqrt(squares / self.width + self.eps).unsqueeze(-1)).to(x.dtype) * self.scale
