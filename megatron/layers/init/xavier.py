"""Xavier (Glorot & Bengio 2010)."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from megatron.layers.init import INITS, Fill, InitScale


@INITS.register("xavier_uniform")
def xavier_uniform(scale: InitScale, hidden_matrix: bool) -> Fill:
    """U(-a, a) with a = sqrt(6 / (fan_in + fan_out)) of the full (fused) matrix."""

    def fill(tensor: Tensor, generator: Generator) -> None:
        torch.nn.init.xavier_uniform_(tensor, gain=scale.gain, generator=generator)

    return fill


@INITS.register("xavier_normal")
def xavier_normal(scale: InitScale, hidden_matrix: bool) -> Fill:
    """N(0, sqrt(2 / (fan_in + fan_out))) of the full (fused) matrix."""

    def fill(tensor: Tensor, generator: Generator) -> None:
        torch.nn.init.xavier_normal_(tensor, gain=scale.gain, generator=generator)

    return fill
