"""What Mamba-1 and Mamba-2 share: the convolution's weights, initial values.

Legend: b batch, s sequence, c channels, k taps of the convolution, /tp = this rank's part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor, nn

from megatron.layers.mamba_kernels import Conv
from megatron.mpu import sharding
from megatron.mpu.sharding import InitFunction, ParamSpec
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


class DepthwiseConv(nn.Module):
    """silu(causal convolution) of channels that are split over ranks: weight [c/tp, 1, k], bias [c/tp] or None.

    `blocks`: sizes of parts of the channels that are split one by one.
    """

    def __init__(self, model: ModelConfig, state: ParallelState, channels: int, blocks: tuple[int, ...], conv: Conv):
        super().__init__()
        taps = model.mamba_d_conv
        fill = uniform(taps**-0.5)  # torch's own for a convolution with one channel per group
        # Neither a matrix that Muon could orthogonalise nor free of weight decay.
        spec = ParamSpec(shape=(channels, 1, taps), init=fill, split_dim=0, blocks=blocks, kind="vector", decay=True)
        self.weight = sharding.parameter(spec, state)
        bias = ParamSpec(shape=(channels,), init=fill, split_dim=0, blocks=blocks)
        self.bias = sharding.parameter(bias, state) if model.mamba_use_bias_in_conv else None
        self.taps = taps
        self.conv = conv
        self.uncompiled = ("conv",)

    def forward(self, x: Tensor, ids: Tensor | None = None, tail: Tensor | None = None) -> Tensor:
        """[b, s, c/tp] -> the same; `ids` and `tail` as in mamba_conv."""
        return self.conv(x, self.weight, self.bias, ids, tail)


def state_parameter(
    model: ModelConfig, state: ParallelState, shape: tuple[int, ...], init: InitFunction
) -> nn.Parameter:
    """A_log or D: split over its first dimension, never decayed, in fp32 if `mamba_selective_fp32_params`."""
    spec = ParamSpec(
        shape=shape,
        init=init,
        split_dim=0,
        kind="vector",
        decay=False,
        keep_fp32=model.mamba_selective_fp32_params,
    )
    return sharding.parameter(spec, state)


def uniform(bound: float) -> InitFunction:
    """U(-bound, bound)."""

    def fill(full: Tensor, generator: Generator) -> None:
        full.uniform_(-bound, bound, generator=generator)

    return fill


def count_up(full: Tensor, generator: Generator) -> None:
    """A_log of Mamba-1: A = -(1, 2, ..., n) in every channel (S4D-Real, Gu & Dao 2023, section 3.6)."""
    full.copy_(torch.arange(1, full.shape[-1] + 1, dtype=full.dtype).log())


def log_uniform(full: Tensor, generator: Generator) -> None:
    """A_log of Mamba-2: -A uniform from 1 to 16 (Dao & Gu 2024)."""
    full.uniform_(1.0, 16.0, generator=generator).log_()


def step_bias(model: ModelConfig) -> InitFunction:
    """Bias of the step sizes: softplus(bias) is log-uniform from `mamba_dt_min` to `mamba_dt_max`."""
    low, high = math.log(model.mamba_dt_min), math.log(model.mamba_dt_max)

    def fill(full: Tensor, generator: Generator) -> None:
        full.uniform_(low, high, generator=generator).exp_().clamp_(min=model.mamba_dt_init_floor)
        full.add_(torch.log(-torch.expm1(-full)))  # the inverse of softplus

    return fill
