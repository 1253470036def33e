"""The exponential moving average of the weights: m <- d m + (1 - d) w after each update, from the first weights on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

EMA = "ema"
"""Its name beside the optimizer's moments, in `Engine.read_share` and checkpoints."""


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

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange averages and weights."""
        for name, mean in self.means.items():
            weights = self.masters[name].clone()
            self.masters[name].copy_(mean)
            mean.copy_(weights)
