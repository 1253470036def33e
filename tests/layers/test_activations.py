"""Activations against their formulas in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from megatron.layers.activations import ACTIVATIONS, build_activation

pytestmark = pytest.mark.cpu

X = torch.linspace(-4, 4, 81, dtype=torch.float64)


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "relu": lambda x: x.clamp(min=0),
    "softsign": lambda x: x / (1 + x.abs()),
    "swish": lambda x: x / (1 + torch.exp(-x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    **dict.fromkeys(("gelu_tanh", "gelu_pytorch_tanh", "gelu_new", "gelu_fast"), _gelu_tanh),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "tanh": lambda x: (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    **dict.fromkeys(("relu2", "squared_relu"), lambda x: x.clamp(min=0) ** 2),
    "mish": lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
    "geglu": _gelu,
    "geglu_tanh": _gelu_tanh,
    "reglu": lambda x: x.clamp(min=0),
    "bilinear": lambda x: x,
    "glu": lambda x: 1 / (1 + torch.exp(-x)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str) -> None:
    assert (build_activation(name).function(X) - FORMULAS[name](X)).abs().max() < 1e-12


@pytest.mark.parametrize("name", sorted(set(FORMULAS) - {"softsign"}))
def test_names_of_hugging_face_compute_the_same(name: str) -> None:
    theirs = ACTIVATIONS.row(name)["hf"]
    assert (build_activation(name).function(X) - ACT2FN[theirs](X)).abs().max() < 1e-12


def test_bias_gelu_fusion_is_the_tanh_approximation() -> None:
    fused = build_activation("gelu", bias_gelu_fusion=True).function(X)
    assert (fused - _gelu_tanh(X)).abs().max() < 1e-12
    assert (fused - _gelu(X)).abs().max() > 1e-4
    assert torch.equal(
        build_activation("silu", bias_gelu_fusion=True).function(X), build_activation("silu").function(X)
    )
