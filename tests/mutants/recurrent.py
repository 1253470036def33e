"""Mistakes in state-space and RWKV layers between tensor-parallel ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.layers import mamba2
from megatron.layers.mamba2 import GatedRMSNorm
from megatron.layers.rwkv import Mixing
from tests.mutants.registry import mutant
from tests.training.tiny import Layout

TP = Layout(tp=2)
SP = Layout(tp=2, micro=1, sequence_parallel=True)


@mutant("mamba", TP, "loss")
def selection_of_own_channels() -> Any:
    """Step sizes, B and C are made of this rank's channels only (GPT-NeoX)."""
    from megatron.mpu.layers import RowParallelLinear

    original = RowParallelLinear.forward

    def forward(self: RowParallelLinear, x: Tensor, reduce: bool = True) -> Tensor:
        if self.weight.shape[0] < x.shape[1]:  # x_proj alone is so narrow
            return self.add_bias(original(self, x, reduce=False))
        return original(self, x, reduce)

    return mock.patch.object(RowParallelLinear, "forward", forward)


@mutant("mamba", TP, "gradient of 2.mixer.x_proj.weight")
def selection_gradient_of_own_channels() -> Any:
    """What is summed over ranks and used by each gets the gradient of one."""
    return mock.patch("megatron.layers.mamba.enter_tensor_parallel", lambda x, state: x)


@mutant("mamba2", TP, "loss")
def group_norm_of_own_heads() -> Any:
    """The norm of a group that ranks share takes the mean over this rank's heads."""

    def means(self: GatedRMSNorm, heads: Tensor) -> Tensor:
        return heads.square().mean((1, 2), keepdim=False).unsqueeze(1).expand(heads.shape[:2])

    return mock.patch.object(GatedRMSNorm, "_means", means)


@mutant("mamba2", TP, "gradient of 2.mixer.in_proj.weight")
def group_gradient_of_own_heads() -> Any:
    """B and C of a group that ranks share get the gradient of this rank's heads."""
    return mock.patch.object(mamba2, "sum_gradient", lambda x, state, inside=None: x)


@mutant("rwkv4", TP, "gradient of 2.time_mixing.time_mix_key")
def mixing_gradient_of_own_columns() -> Any:
    """Mixing vectors keep the gradient of this rank's columns."""
    return mock.patch("megatron.layers.rwkv.sum_gradient", lambda x, state, inside=None: x)


@mutant("rwkv6", TP, "gradient of 2.time_mixing.time_maa_x")
def low_rank_gradient_of_own_heads() -> Any:
    """RWKV-6's vectors and small matrices keep the gradient of this rank's heads."""
    return mock.patch("megatron.layers.rwkv6.sum_gradient", lambda x, state, inside=None: x)


@mutant("rwkv4", SP, "loss")
def shift_inside_own_tokens() -> Any:
    """The token before the first of a slice of the sequence is nothing, and not the last of the slice before."""
    original = Mixing.enter

    def enter(self: Mixing, x: Tensor, b: int, starts: Any, real: Any, before: Any) -> Any:
        x, shifted = original(self, x, b, starts, real, before)
        cut = torch.arange(x.shape[1]) % (x.shape[1] // self.state.tp_size) == 0
        return x, shifted.masked_fill(cut.view(1, -1, 1), 0.0)

    return mock.patch.object(Mixing, "enter", enter)
