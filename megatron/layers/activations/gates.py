"""Activations of a gate that multiplies a second projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.layers.activations import ACTIVATIONS, gelu_tanh

ACTIVATIONS.register("swiglu", gated=True, hf="silu", doc="silu of the gate.")(F.silu)
ACTIVATIONS.register("geglu", gated=True, hf="gelu", doc="GELU of the gate.")(F.gelu)
ACTIVATIONS.register("geglu_tanh", gated=True, hf="gelu_pytorch_tanh", doc="GELU's tanh approximation of the gate.")(
    gelu_tanh
)
ACTIVATIONS.register("reglu", gated=True, hf="relu", doc="relu of the gate.")(F.relu)
ACTIVATIONS.register("glu", gated=True, hf="sigmoid", doc="sigmoid of the gate.")(torch.sigmoid)


@ACTIVATIONS.register("bilinear", gated=True, hf="linear")
def bilinear(gate: Tensor) -> Tensor:
    """The gate as it is."""
    return gate
