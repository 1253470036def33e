"""Orthogonal matrices."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from megatron.layers.init import INITS, Fill, InitScale


def _orthogonal(gain: float) -> Fill:
    def fill(tensor: Tensor, generator: Generator) -> None:
        torch.nn.init.orthogonal_(tensor, gain=gain, generator=generator)

    return fill


@INITS.register("orthogonal")
def orthogonal(scale: InitScale, hidden_matrix: bool) -> Fill:
    """Orthonormal rows or columns, whichever are fewer (GPT-NeoX raises here)."""
    return _orthogonal(scale.gain)


@INITS.register("scaled_orthogonal")
def scaled_orthogonal(scale: InitScale, hidden_matrix: bool) -> Fill:
    """Orthogonal with gain sqrt(2 / L)."""
    return _orthogonal(scale.gain * math.sqrt(2.0 / scale.num_layers))
