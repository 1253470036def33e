"""LoRA and DoRA: small trained matrices beside the frozen weight of a linear layer.

Legend: t tokens, in and out features, r rank, /tp = this rank's part.

| kind | y of x, with W' = W + s·B·A                          | Source                                     |
|------|------------------------------------------------------|--------------------------------------------|
| LoRA | x·W'ᵀ + bias, s = alpha / r                          | Hu et al. 2021, arXiv 2106.09685           |
|      | the same, s = alpha / √r (use_rslora)                | Kalajdzievski 2023, arXiv 2312.03732       |
| DoRA | m/‖W'‖ · x·W'ᵀ + bias, ‖·‖ of rows, without gradient | Liu et al. 2024, arXiv 2402.09353, §4.3    |

B starts at zero and m at ‖W‖, so a new adapter changes nothing. A fused matrix has one A, and a B whose rows are cut
like the weight's: A goes with each of q, k, v, and B's blocks are theirs. A layer that is split by its outputs has a
whole A on every rank and B like its weight; one that is split by its inputs the other way round: its ranks add up
partial sums of the change as they do of the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.layers.dropout import sharded_rng
from megatron.mpu import sharding
from megatron.mpu.collectives import all_reduce, sum_gradient
from megatron.mpu.layers import LinearRecipe, ParallelLinear, linear
from megatron.mpu.sharding import ParamSpec, spec_of
from megatron.neox_arguments.schema_post import ALL_LINEAR

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_post import PostConfig

PARTS = (".lora.A", ".lora.B", ".lora.magnitude")
"""How the canonical names of parameters of adapters end, behind that of their layer."""


@dataclass(frozen=True)
class Adapters:
    """Which layers get adapters, and what these are like.

    Attributes:
        rank: r.
        scaling: s.
        dropout: of the adapter's input.
        targets: names or patterns of linear layers.
        dora: whether there is a magnitude.
    """

    rank: int
    scaling: float
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dora: bool = False

    @staticmethod
    def of(post: PostConfig) -> Adapters | None:
        """What the configuration asks for; None: no adapters."""
        if post.lora_r is None:
            return None
        scaling = post.lora_alpha / (math.sqrt(post.lora_r) if post.use_rslora else post.lora_r)
        return Adapters(post.lora_r, scaling, post.lora_dropout, post.lora_target_modules, post.use_dora)

    def fit(self, layer: str) -> bool:
        """Whether the linear layer with this name (`2.attention.dense`) gets one."""
        return any(fits(target, layer) for target in self.targets)


def fits(target: str, layer: str) -> bool:
    """Whether an entry of `lora_target_modules` speaks of a linear layer: by a pattern of its whole name, or by the
    last parts of it."""
    return target == ALL_LINEAR or fnmatchcase(layer, target) or layer.endswith(f".{target}")


class Lora(nn.Module):
    """The adapter of one linear layer: `A` [r, in], `B` [out, r], and with DoRA `magnitude` [out].

    `enabled`: while it is False, the layer computes what it would without.
    """

    def __init__(self, layer: ParallelLinear, adapters: Adapters) -> None:
        super().__init__()
        state, weight = layer.state, spec_of(layer.weight)
        self.state, self.scaling, self.dropout = state, adapters.scaling, adapters.dropout
        self.by_outputs = weight.split_dim == 0
        self.enabled = True
        out, inputs = weight.shape
        rows = {"split_dim": 0, "blocks": weight.blocks} if self.by_outputs else {}
        columns = {} if self.by_outputs else {"split_dim": 1}
        bound = 1 / math.sqrt(inputs)  # PEFT's: Kaiming's uniform with a = √5

        def draw(full: Tensor, generator: torch.Generator) -> None:
            full.uniform_(-bound, bound, generator=generator)

        self.A = sharding.parameter(ParamSpec(shape=(adapters.rank, inputs), init=draw, **columns), state)
        self.B = sharding.parameter(ParamSpec(shape=(out, adapters.rank), init=sharding.zeros, **rows), state)
        self.magnitude: nn.Parameter | None = None
        if adapters.dora:
            # `start` gives it its value.
            self.magnitude = sharding.parameter(ParamSpec(shape=(out,), init=sharding.ones, **rows), state)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: LinearRecipe | str | None) -> Tensor:
        """x [t, in(/tp)] -> [t, out(/tp)], with the layer's weight, bias and recipe."""
        if not self.enabled:
            return linear(x, weight, bias, recipe)
        dropped = self._drop(x)
        change = linear(linear(dropped, self._whole(self.A, self.by_outputs)), self._whole(self.B, not self.by_outputs))
        change = self.scaling * change
        if self.magnitude is None:
            return linear(x, weight, bias, recipe) + change
        base = linear(x, weight, None, recipe)
        factor = self._whole(self.magnitude, not self.by_outputs) / self._lengths(weight)
        if dropped is x:
            out = factor * (base + change)
        else:
            out = base + (factor - 1) * linear(dropped, weight, None, recipe) + factor * change
        return out if bias is None else out + bias

    @torch.no_grad()
    def start(self, weight: Tensor) -> None:
        """Begin with the lengths of the weight's rows. Collective over the tensor-parallel ranks."""
        if self.magnitude is not None:
            self.magnitude.copy_(self._lengths(weight))

    def _whole(self, p: Tensor, replicated: bool) -> Tensor:
        """A parameter that every rank has, used for other columns by each: its gradient is summed over them."""
        return sum_gradient(p, self.state, "tensor") if replicated else p

    def _drop(self, x: Tensor) -> Tensor:
        if self.dropout == 0.0 or not self.training:
            return x
        with nullcontext() if self.by_outputs else sharded_rng(self.dropout, self.state):
            return F.dropout(x, self.dropout)

    @torch.no_grad()
    def _lengths(self, weight: Tensor) -> Tensor:
        """‖W'‖ of each row, [out(/tp)]."""
        squares = torch.addmm(weight, self.B, self.A, alpha=self.scaling).float().square().sum(1)
        if not self.by_outputs and self.state.tp_size > 1:
            squares = all_reduce(squares, self.state)
        return squares.sqrt().to(weight.dtype)


def add_adapters(module: nn.Module, index: int, adapters: Adapters) -> None:
    """Give the linear layers of a layer of the network, GPT-NeoX's number `index`, the adapters that are asked for."""
    for name, layer in adaptable(module, index):
        if adapters.fit(name):
            layer.lora = Lora(layer, adapters)
            if adapters.dropout and not layer.lora.by_outputs and layer.state.tp_size > 1:
                layer.uncompiled = ("forward",)  # a generator for its own columns, that no graph can hold


def adaptable(module: nn.Module, index: int) -> Iterator[tuple[str, ParallelLinear]]:
    """(Canonical name, linear layer) of those that can have an adapter."""
    for name, layer in module.named_modules():
        if isinstance(layer, ParallelLinear) and layer.adaptable:
            yield f"{index}.{name}", layer


def start_adapters(module: nn.Module) -> None:
    """Give adapters what they begin with besides what is drawn. Behind `initialize`; collective like it."""
    for layer in module.modules():
        if isinstance(layer, ParallelLinear) and layer.lora is not None:
            layer.lora.start(layer.weight)


@contextmanager
def switched_off(module: nn.Module) -> Iterator[None]:
    """Inside, the module computes as if it had no adapters."""
    found = [part for part in module.modules() if isinstance(part, Lora) and part.enabled]
    for part in found:
        part.enabled = False
    try:
        yield
    finally:
        for part in found:
            part.enabled = True
