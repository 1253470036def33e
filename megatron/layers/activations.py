"""FFN activations. Plain ones map [t, F] to [t, F]; gated ones pick the function that acts on the gate.

A gated FFN computes `act(gate) * up` with the fused rows [up ; gate] (see mlp.py); which names are gated is a fact of
the configuration (`neox_arguments` needs it for the FFN width), here it is the second field of the entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.registry import Registry

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    """An elementwise function, and whether it acts on a gate that multiplies a second projection."""

    function: Function
    gated: bool = False


def identity(x: Tensor) -> Tensor:
    """The "activation" of the bilinear gate."""
    return x


gelu_tanh: Function = partial(F.gelu, approximate="tanh")

ACTIVATIONS: Registry[Activation] = Registry(
    "activation",
    wants="an Activation(function, gated=...) of megatron.layers.activations",
    fits=lambda entry: isinstance(entry, Activation),
)
"""`Activation`s. The function is elementwise, keeps shape and type, has no parameters and draws no random numbers; with
`gated=True` it acts on the gate, and the feed-forward has twice the rows in its first matrix.
"""
ACTIVATIONS.register("gelu")(Activation(F.gelu))
ACTIVATIONS.register("relu")(Activation(F.relu))
ACTIVATIONS.register("softsign")(Activation(F.softsign))
ACTIVATIONS.register("swish", "silu")(Activation(F.silu))
ACTIVATIONS.register("mish")(Activation(F.mish))
ACTIVATIONS.register("swiglu")(Activation(F.silu, gated=True))
ACTIVATIONS.register("geglu")(Activation(F.gelu, gated=True))
ACTIVATIONS.register("geglu_tanh")(Activation(gelu_tanh, gated=True))
ACTIVATIONS.register("reglu")(Activation(F.relu, gated=True))
ACTIVATIONS.register("bilinear")(Activation(identity, gated=True))
ACTIVATIONS.register("glu")(Activation(torch.sigmoid, gated=True))


def build_activation(name: str, *, bias_gelu_fusion: bool = False) -> Activation:
    """The entry called `name`; `gelu` with `bias_gelu_fusion` is the tanh approximation, as GPT-NeoX computes it."""
    if name == "gelu" and bias_gelu_fusion:
        return Activation(gelu_tanh)
    return ACTIVATIONS[name]
