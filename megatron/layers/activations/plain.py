"""Activations of the feed-forward's one projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.layers.activations import ACTIVATIONS, gelu_tanh

ACTIVATIONS.register("gelu", hf="gelu", doc="x times the normal distribution function of x.")(F.gelu)
ACTIVATIONS.register(
    "gelu_tanh", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", hf="gelu_pytorch_tanh", doc="GELU's tanh approximation."
)(gelu_tanh)
ACTIVATIONS.register("relu", hf="relu", doc="max(x, 0).")(F.relu)
ACTIVATIONS.register("softsign", doc="x / (1 + |x|).")(F.softsign)
ACTIVATIONS.register("silu", "swish", hf="silu", doc="x * sigmoid(x).")(F.silu)
ACTIVATIONS.register("mish", hf="mish", doc="x * tanh(log(1 + exp(x))).")(F.mish)
ACTIVATIONS.register("tanh", hf="tanh", doc="The hyperbolic tangent.")(torch.tanh)
ACTIVATIONS.register("sigmoid", hf="sigmoid", doc="1 / (1 + exp(-x)).")(torch.sigmoid)


@ACTIVATIONS.register("quick_gelu", hf="quick_gelu")
def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), GELU's sigmoid approximation (CLIP)."""
    return x * torch.sigmoid(1.702 * x)


@ACTIVATIONS.register("relu2", "squared_relu", hf="relu2")
def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (Primer, Nemotron)."""
    return F.relu(x).square()
