"""Dropout that fits the layout: the same mask on all tensor-parallel ranks where tensors agree, another where not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor

from megatron.mpu.random import tensor_parallel_rng
from megatron.mpu.state import ParallelState


def hidden_dropout(x: Tensor, probability: float, training: bool, state: ParallelState) -> Tensor:
    """Dropout of hidden states: replicated over tensor-parallel ranks [t, h], or, under sequence parallelism, this
    rank's tokens [t/tp, h]."""
    if probability == 0.0 or not training:
        return x
    with tensor_parallel_rng(state) if state.sequence_parallel else nullcontext():
        return F.dropout(x, probability)


def sharded_rng(probability: float, state: ParallelState) -> AbstractContextManager[None]:
    """The generator for dropout inside the tensor-parallel region (this rank's heads); nothing when there is none."""
    return tensor_parallel_rng(state) if probability > 0.0 else nullcontext()
