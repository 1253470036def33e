"""Weights that are evaluated in place of those in training: the exponential moving average, m <- d m + (1 - d) w after
each update, from the first weights on; or what an optimizer makes of its own (schedule-free)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

EMA = "ema"
"""The name of the moving average beside the optimizer's moments, in `Engine.read_share` and checkpoints."""
EVALUATED = "evaluated"
"""In `Engine.read_share`: what an optimizer makes of weights and state, for files of weights alone."""
REFERENCE = "reference"
"""In `Engine.read_share` and checkpoints: the weights that a run began with, where it is kept near them."""


@torch.no_grad()
def exchange(masters: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Exchange weights, by parameter, and what is evaluated in their place."""
    for name, other in others.items():
        weights = masters[name].clone()
        masters[name].copy_(other)
        other.copy_(weights)


class WeightAverage:
    """The average of the elements that this rank answers for.

    Args:
        decay: d.
        masters: by parameter, the fp32 weights of these elements, 1-D: views of what the optimizer moves.

    Attributes:
        means: by parameter, their averages, fp32.
        begun: parameters whose average began with weights that were loaded without one.
    """

    def __init__(self, decay: float, masters: Mapping[str, Tensor]) -> None:
        self.decay = decay
        self.masters = dict(masters)
        self.means = {name: master.detach().clone() for name, master in self.masters.items()}
        self.begun: set[str] = set()

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """After an update. `skipped`: 0-dim bool on the device: there was none. The host does not wait for it."""
        shares: dict[torch.device, Tensor] = {}  # of the new weights; masters may be in the host's memory
        for name, mean in self.means.items():
            if mean.device not in shares:
                shares[mean.device] = ((1 - self.decay) * (~skipped).float()).to(mean.device)
            mean.lerp_(self.masters[name], shares[mean.device])

    @torch.no_grad()
    def load(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Take the average from a checkpoint; from its weights where it has none."""
        if name not in self.means or not values:
            return
        if EMA not in values:
            self.begun.add(name)
        self.means[name].copy_(values.get(EMA, self.masters[name]))
