"""How weight matrices are filled at the start of training (GPT-NeoX's `init_method` names).

Every entry of `INITS` takes an `InitScale` and the kind of the parameter and returns a function that fills a full
logical matrix `[out, in]` in place, in fp32, drawing from the generator that it gets. The layout has no
influence: the caller fills the full tensor and slices it.

Sources: small_init is Nguyen & Salazar 2019 (sqrt(2/5h)); wang_init is Wang's GPT-J recipe (2 / (L sqrt(h)));
scaled_normal is GPT-2's 1/sqrt(2L) for the layers that write into the residual stream. Width multipliers follow
Tensor Programs V (muP, arXiv 2203.03466, table 8): matrices that map width to width shrink by 1/sqrt(m) unless their
formula already contains the width; embeddings and the output matrix stay as they are at the base width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Generator, Tensor

from megatron.registry import Registry, import_entries

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
and returns a function that fills a full logical fp32 matrix in place and draws from the generator that it gets, and
from no other, so that no layout changes a weight.
"""


def build_init(model: ModelConfig, *, residual: bool = False, hidden_matrix: bool = True) -> Fill:
    """The fill function the config names: `init_method`, or for a matrix that writes into the residual stream
    `output_layer_init_method`. `hidden_matrix` is False for embeddings and the output matrix (see muP above)."""
    name = model.output_layer_init_method if residual else model.init_method
    return INITS[name](InitScale.of(model), hidden_matrix)


import_entries(__name__, __path__)
