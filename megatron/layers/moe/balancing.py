"""Balancing experts without a loss: biases that move towards an equal load (Wang et al. 2024, arXiv 2408.15664).

Legend: M mixture-of-experts layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.layers.moe.layer import MixtureOfExperts
from megatron.mpu.sharding import block_of


def moe_layers(module: nn.Module) -> dict[int, MixtureOfExperts]:
    """The mixtures of experts of a stage by the number of their block, from 0, in order."""
    found = [part for part in module.modules() if isinstance(part, MixtureOfExperts)]
    return {block_of(part.router.weight): part for part in found}


@torch.no_grad()
def move_biases(layers: Sequence[MixtureOfExperts], chosen: Tensor, rate: float) -> None:
    """After a step: the bias of an expert that got fewer than the mean of `chosen` [M, E] (assignments of the global
    batch) grows by `rate`, that of one that got more shrinks by it."""
    steps = rate * (chosen.mean(dim=1, keepdim=True) - chosen).sign()
    for layer, step in zip(layers, steps, strict=True):
        bias = layer.router.expert_bias
        if bias is not None:
            bias += step.to(bias.dtype)
