"""Matrix products by Transformer Engine: `te_columnparallel`, `te_rowparallel`, and those of `te_mha`.

Legend: t tokens.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.layers.transformer_engine import Borrowed, find, load
from megatron.mpu.layers import LINEAR_RECIPES, LinearRecipe

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

NAME = "transformer_engine"


class EngineLinear:
    """A linear recipe: x [t, in], weight [out, in], bias [out] | None -> [t, out], by `Linear`. One per layer, for each
    has FP8 scales of its own."""

    one_graph = False

    def __init__(self, engine: ModuleType | None = None) -> None:
        self._engine = engine
        self._by_bias: dict[bool, Borrowed] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out_features, in_features = weight.shape
        with_bias = bias is not None

        def make(dtype: torch.dtype) -> nn.Module:
            engine = self._engine or load(x.device)
            made: nn.Module = engine.Linear(
                in_features, out_features, bias=with_bias, params_dtype=dtype, device="meta"
            )
            return made

        borrowed = self._by_bias.setdefault(with_bias, Borrowed(make))
        product: Tensor = borrowed({"weight": weight, "bias": bias}, x)
        return product


LINEAR_RECIPES.register(NAME)(lambda x, weight, bias: EngineLinear()(x, weight, bias))


def engine_recipes(
    model: ModelConfig, device: torch.device, both: bool
) -> tuple[LinearRecipe | None, LinearRecipe | None]:
    """Recipes for a layer's column-parallel and row-parallel product; None: the plain one. `both`: whatever
    te_columnparallel and te_rowparallel say."""
    wanted = both or model.te_columnparallel, both or model.te_rowparallel
    engine = find(device)[0] if any(wanted) else None
    column, row = (None if engine is None or not one else EngineLinear(engine) for one in wanted)
    return column, row
