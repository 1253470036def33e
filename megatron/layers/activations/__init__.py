"""Feed-forward activations: elementwise functions [t, F] -> [t, F].

A gated feed-forward computes `act(gate) * up` with the fused rows [up ; gate] (see mlp.py); which activations act on a
gate is a fact of their row, because the width of the feed-forward depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from megatron.registry import Registry, import_entries

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    """An elementwise function, and whether it acts on a gate that multiplies a second projection."""

    function: Function
    gated: bool = False

    def __call__(self, wide: Tensor) -> Tensor:
        """[t, F], or with a gate [t, 2F] = [up ; gate] -> [t, F]."""
        if not self.gated:
            return self.function(wide)
        up, gate = wide.chunk(2, dim=-1)
        return self.function(gate) * up


gelu_tanh: Function = partial(F.gelu, approximate="tanh")

ACTIVATIONS: Registry[Function] = Registry(
    "activation", wants="a function tensor -> tensor", fits=callable, fields=("gated", "hf")
)
"""Functions. An entry is elementwise, keeps shape and type, has no parameters and draws no random numbers. Its row:

* `gated=True`: it acts on the gate, and the feed-forward has twice the rows in its first matrix;
* `hf="name"`: what Hugging Face's `hidden_act` calls the function.
"""


def build_activation(name: str, *, bias_gelu_fusion: bool = False) -> Activation:
    """The entry called `name`; `gelu` with `bias_gelu_fusion` is the tanh approximation, as GPT-NeoX computes it."""
    if name == "gelu" and bias_gelu_fusion:
        return Activation(gelu_tanh)
    return Activation(ACTIVATIONS[name], ACTIVATIONS.row(name).get("gated", False))


import_entries(__name__, __path__)
