"""Linear layers and the embedding, split over tensor-parallel ranks.

Legend: t = b·s tokens, h hidden, v vocabulary, /tp = this rank's part. Under sequence parallelism the hidden states
outside the tensor-parallel region are [t/tp, h].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu import sharding
from megatron.mpu.collectives import enter_tensor_parallel, leave_tensor_parallel, sum_gradient
from megatron.mpu.product_sums import sum_of, summed_linear
from megatron.mpu.sharding import InitFunction, ParamSpec
from megatron.mpu.state import ParallelState
from megatron.registry import Registry

LinearRecipe = Callable[[Tensor, Tensor, Tensor | None], Tensor]
LINEAR_RECIPES: Registry[LinearRecipe] = Registry("linear recipe", wants="a function (x, weight, bias)", fits=callable)
"""How to multiply: an entry is a function (x [t, in], weight [out, in], bias [out] | None) -> [t, out]. A recipe may be
a module with parameters of its own; it then becomes part of the layer that holds it. One that torch.compile cannot
take says `one_graph = False`.
"""


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, recipe: LinearRecipe | str | None = None) -> Tensor:
    """x [t, in] · w [out, in]ᵀ + bias [out]: the one place where the model multiplies matrices.

    `recipe` is None (plain), a name in LINEAR_RECIPES, or a function with a recipe's signature.
    """
    if recipe is None:
        offered = sum_of(w)
        return F.linear(x, w, bias) if offered is None else summed_linear(x, w, bias, offered)
    return (LINEAR_RECIPES[recipe] if isinstance(recipe, str) else recipe)(x, w, bias)


class ParallelLinear(nn.Module):
    """What both kinds of linear layers have in common.

    Attributes:
        lora: an adapter (layers/lora.py), which multiplies in place of the recipe: called with (x, weight, bias,
            recipe). Part of the layer.
        adaptable: False where somebody reads the weight without calling the layer, so that an adapter would do nothing.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, state: ParallelState, recipe: LinearRecipe | str | None) -> None:
        super().__init__()
        self.state = state
        self.recipe = recipe
        self.uncompiled = () if getattr(recipe, "one_graph", True) else ("forward",)
        self.lora: nn.Module | None = None
        self.adaptable = True

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x · weightᵀ + bias, on this rank alone."""
        if self.lora is not None:
            return self.lora(x, self.weight, bias, self.recipe)
        return linear(x, self.weight, bias, self.recipe)


class ColumnParallelLinear(ParallelLinear):
    """Each rank computes `out_features/tp` of the outputs: weight [out/tp, in], bias [out/tp] or None.

    `blocks`: sizes of output parts that are split one by one (q, k, v). `padded`: out_features in memory if it is a
    padded vocabulary.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        state: ParallelState,
        init: InitFunction,
        bias: bool = True,
        blocks: tuple[int, ...] = (),
        heads: tuple[int, ...] = (),
        bias_init: InitFunction | None = None,
        decay: bool = True,
        padded: int | None = None,
        kind: str = "matrix",
        recipe: LinearRecipe | str | None = None,
    ) -> None:
        super().__init__(state, recipe)
        shape = (out_features, in_features)
        spec = ParamSpec(
            shape=shape,
            init=init,
            split_dim=0,
            blocks=tuple(blocks),
            heads=heads,
            padded=padded,
            decay=decay,
            kind=kind,
        )
        self.weight = sharding.parameter(spec, state)
        bias_spec = replace(spec, shape=(out_features,), init=bias_init or sharding.zeros, decay=False, kind="vector")
        self.bias = sharding.parameter(bias_spec, state) if bias else None

    def forward(self, x: Tensor, entered: bool = False) -> Tensor:
        """[t, in] ([t/tp, in] under sequence parallelism) -> [t, out/tp].

        `entered`: x already went through `enter_tensor_parallel`, which two layers with one input share.
        """
        if not entered:
            x = enter_tensor_parallel(x, self.state)
        return self.multiply(x, self.bias)


class RowParallelLinear(ParallelLinear):
    """Each rank takes `in_features/tp` of the inputs: weight [out, in/tp]; the bias [out] is replicated."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        state: ParallelState,
        init: InitFunction,
        bias: bool = True,
        bias_init: InitFunction | None = None,
        decay: bool = True,
        kind: str = "matrix",
        recipe: LinearRecipe | str | None = None,
    ) -> None:
        super().__init__(state, recipe)
        spec = ParamSpec(shape=(out_features, in_features), init=init, split_dim=1, decay=decay, kind=kind)
        self.weight = sharding.parameter(spec, state)
        bias_spec = ParamSpec(shape=(out_features,), init=bias_init or sharding.zeros, sequence_reduced=True)
        self.bias = sharding.parameter(bias_spec, state) if bias else None

    def forward(self, x: Tensor, reduce: bool = True) -> Tensor:
        """[t, in/tp] -> [t, out] ([t/tp, out] under sequence parallelism), the bias added once.

        `reduce=False` returns this rank's partial sum [t, out] without the bias: the caller adds several of them,
        calls `leave_tensor_parallel` once and then `add_bias` of each.
        """
        if not reduce:
            return self.multiply(x, None)
        if self.state.tp_size == 1:
            return self.multiply(x, self.bias)
        return self.add_bias(leave_tensor_parallel(self.multiply(x, None), self.state))

    def add_bias(self, y: Tensor) -> Tensor:
        """y (already summed over ranks) + bias; under sequence parallelism the bias's gradient is summed over ranks."""
        return y if self.bias is None else y + sum_gradient(self.bias, self.state)


class VocabParallelEmbedding(nn.Module):
    """Each rank holds `padded_vocab_size/tp` rows of the table: weight [v/tp, h].

    `tied`: canonical name of the shared table when the output projection uses it as well.
    """

    def __init__(
        self,
        vocab_size: int,
        padded_vocab_size: int,
        hidden: int,
        *,
        state: ParallelState,
        init: InitFunction,
        tied: str | None = None,
    ) -> None:
        super().__init__()
        self.state = state
        shape = (vocab_size, hidden)
        spec = ParamSpec(shape=shape, init=init, split_dim=0, padded=padded_vocab_size, kind="embedding", tied=tied)
        self.weight = sharding.parameter(spec, state)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [b, s] int64 -> [b·s, h] ([b·s/tp, h] under sequence parallelism)."""
        ids = tokens.reshape(-1)
        if self.state.tp_size == 1:
            return F.embedding(ids, self.weight)
        rows = self.weight.shape[0]
        local = ids - self.state.tp_rank * rows
        mine = (local >= 0) & (local < rows)
        found = F.embedding(local.clamp(0, rows - 1), self.weight)
        return leave_tensor_parallel(found * mine.unsqueeze(1), self.state)
