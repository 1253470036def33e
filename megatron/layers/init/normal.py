"""Normal distributions, by a standard deviation or by a formula of width and depth."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Generator, Tensor

from megatron.layers.init import INITS, Fill, InitScale


def _normal(std: float) -> Fill:
    def fill(tensor: Tensor, generator: Generator) -> None:
        tensor.normal_(0.0, std, generator=generator)

    return fill


def _constant_std(scale: InitScale, hidden_matrix: bool, depth: float) -> Fill:
    """sigma / depth, and muP's 1/sqrt(m) for width-to-width matrices."""
    shrink = math.sqrt(scale.width) if hidden_matrix else 1.0
    return _normal(scale.gain * scale.std / (depth * shrink))


def _width_std(scale: InitScale, hidden_matrix: bool, std_at: Callable[[float], float]) -> Fill:
    """A formula that already shrinks with the width; embeddings under muP use it at the base width."""
    width = scale.hidden if hidden_matrix else scale.hidden / scale.width
    return _normal(scale.gain * std_at(width))


@INITS.register("normal")
def normal(scale: InitScale, hidden_matrix: bool) -> Fill:
    """N(0, sigma), sigma = init_method_std."""
    return _constant_std(scale, hidden_matrix, 1.0)


@INITS.register("scaled_normal")
def scaled_normal(scale: InitScale, hidden_matrix: bool) -> Fill:
    """N(0, sigma / sqrt(2L))."""
    return _constant_std(scale, hidden_matrix, math.sqrt(2.0 * scale.num_layers))


@INITS.register("single_residual_scaled_normal")
def single_residual_scaled_normal(scale: InitScale, hidden_matrix: bool) -> Fill:
    """N(0, sigma / sqrt(L)): one residual branch per block (parallel form)."""
    return _constant_std(scale, hidden_matrix, math.sqrt(scale.num_layers))


@INITS.register("small_init")
def small_init(scale: InitScale, hidden_matrix: bool) -> Fill:
    """N(0, sqrt(2 / 5h))."""
    return _width_std(scale, hidden_matrix, lambda width: math.sqrt(2.0 / (5.0 * width)))


@INITS.register("wang_init")
def wang_init(scale: InitScale, hidden_matrix: bool) -> Fill:
    """N(0, 2 / (L sqrt(h)))."""
    return _width_std(scale, hidden_matrix, lambda width: 2.0 / (scale.num_layers * math.sqrt(width)))
