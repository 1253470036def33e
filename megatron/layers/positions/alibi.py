"""Attention with linear biases."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.layers.positions import POSITIONS, PositionScheme

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def alibi_slopes(heads: int) -> list[float]:
    """One slope per head: 2^(-8i/n) for a power of two n; else those of the power below, filled up with every second
    slope of the power above (Press et al. 2021, arXiv 2108.12409)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-4.0 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return slopes + between[: heads - power]


def _slopes(model: ModelConfig) -> Tensor:
    return torch.tensor(alibi_slopes(model.num_attention_heads), dtype=torch.float32)


POSITIONS.register("alibi", table=None, doc="A slope per head on the distance, added to the attention scores.")(
    PositionScheme(slopes=_slopes)
)
