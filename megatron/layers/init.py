"""How weight matrices are filled at the start of training (GPT-NeoX's `init_method` names).

Every entry of `INITS` takes an `InitScale` and the kind of the parameter and returns a function that fills a full
logical matrix `[out, in]` in place, in fp32, drawing from the generator it is handed. Layout plays no part: the caller
fills the full tensor and slices it.

Sources: small_init is Nguyen & Salazar 2019 (sqrt(2/5h)); wang_init is Wang's GPT-J recipe (2 / (L sqrt(h)));
scaled_normal is GPT-2's 1/sqrt(2L) for the layers that write into the residual stream. Width multipliers follow
Tensor Programs V (muP, arXiv 2203.03466, table 8): matrices that map width to width shrink by 1/sqrt(m) unless their
formula already contains the width; embeddings and the output matrix stay as they are at the base width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from megatron.registry import Registry

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

Fill = Callable[[Tensor, Generator], None]


@dataclass(frozen=True)
class InitScale:
    """The numbers init formulas need. `width` is the muP multiplier m = hidden / base hidden (1 = muP off)."""

    std: float
    num_layers: int
    hidden: int
    width: float = 1.0
    gain: float = 1.0

    @classmethod
    def of(cls, model: ModelConfig) -> InitScale:
        width, gain = (model.mup_width_mult, model.mup_init_scale) if model.use_mup else (1.0, 1.0)
        return cls(model.init_method_std, model.num_layers, model.hidden_size, width, gain)


INITS: Registry[Callable[[InitScale, bool], Fill]] = Registry(
    "init_method", wants="a function (InitScale, hidden_matrix) -> fill(tensor, generator)", fits=callable
)
"""Recipes of initial weights. An entry is a function of an `InitScale` and of whether the matrix maps width to width,
and returns a function that fills a full logical fp32 matrix in place and draws from the generator it is handed, and
from no other, so that no layout changes a weight.
"""


def build_init(model: ModelConfig, *, residual: bool = False, hidden_matrix: bool = True) -> Fill:
    """The fill function the config names: `init_method`, or for a matrix that writes into the residual stream
    `output_layer_init_method`. `hidden_matrix` is False for embeddings and the output matrix (see muP above)."""
    name = model.output_layer_init_method if residual else model.init_method
    return INITS[name](InitScale.of(model), hidden_matrix)


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
