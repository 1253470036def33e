"""Sums whose bits do not depend on the order of their terms, hence not on the layout.

Floating-point addition rounds: which rank and which pass adds what shows in the last bits of a gradient, and after some
hundred steps in all of them. Integers do not round. A gradient is rounded to a multiple of 2^-50 once, per sample, and
the multiples are added up as int64, in whatever order (`deterministic: layout`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.owned import sum_owned
from megatron.mpu.state import ParallelState

UNITS = 2.0**50  # of 1
MOST = 2.0**13  # what a sum of int64 multiples holds: 2^63 / UNITS
SUM_UNITS = 2.0**30  # of sums over many tokens, which hold 2^33: metrics, and what is evaluated
# Of a square between 0 and 1: a coarse part and the rest, whose sums hold 2^37 and 2^32 of them.
COARSE, FINE = 2.0**26, 2.0**58


def to_fixed(x: Tensor, units: float | Tensor = UNITS) -> Tensor:
    """Multiples of 1 / units, int64."""
    return (x.double() * units).round_().to(torch.int64)


def from_fixed(x: Tensor, units: float | Tensor = UNITS) -> Tensor:
    """fp32 again: rounded once."""
    return (x.double() / units).float()


class FixedPointSums:
    """What is added up in fixed point in one step.

    Args:
        means: loss and metrics of nothing, fp32 `[1 + m]`, on the device of the gradients.
        loss_units: of the loss; metrics may be log-probabilities of whole answers, and have SUM_UNITS.

    Attributes:
        terms: how many samples of all ranks are added up in each sum.
        refused: whether a term was too large for its sum, or not finite: the norm is infinite then; 0-dim bool.
    """

    def __init__(self, means: Tensor, loss_units: float = UNITS) -> None:
        self.terms = 1
        self.refused = torch.zeros((), dtype=torch.bool, device=means.device)
        self._means = torch.stack([to_fixed(means)] * 2)  # the sums, and how many terms do not fit into them
        self._units = torch.full_like(means, SUM_UNITS, dtype=torch.float64)
        self._units[0] = loss_units

    def clear(self) -> None:
        """Before a step."""
        self.refused.zero_()
        self._means.zero_()

    def add_means(self, means: Tensor) -> None:
        """One sample's part of the step's loss and metrics, `[1 + m]`."""
        fits = means.abs() < 2.0**63 / self._units / self.terms  # NaN is not below anything
        self._means += torch.stack([to_fixed(means.where(fits, 0.0), self._units), (~fits).to(torch.int64)])

    def means(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
        """Those of all samples, fp32 `[1 + m]`; NaN when one is not finite, or too large for its sum."""
        total, bad = sum_over_ranks(self._means).unbind()
        return torch.where(bad > 0, torch.nan, from_fixed(total, self._units))

    def add(self, total: Tensor, gradient: Tensor, first: bool) -> None:
        """Add one sample's gradient to its sum, int64; the first of a step is written."""
        gradient = gradient.reshape(total.shape)
        self.refused |= ~(gradient.abs() < MOST / self.terms).all()  # NaN is not below anything
        fixed = to_fixed(gradient)
        if first:
            total.copy_(fixed)
        else:
            total.add_(fixed)

    def norm(self, owned: list[Tensor], state: ParallelState) -> Tensor:
        """L2 norm of pieces that together hold the model's gradient once, 0-dim fp32. Collective."""
        largest = torch.stack([piece.abs().amax() for piece in owned if piece.numel()] or [self.refused.float()]).amax()
        largest = torch.where(self.refused, torch.inf, largest).double()
        for name in ("model_pipe", "data"):
            if (group := state.group(name)) is not None:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        coarse, fine = (torch.zeros((), dtype=torch.int64, device=state.device) for _ in range(2))
        for piece in owned:
            squares = (piece.double() / largest).nan_to_num_(0.0).square_()
            high = (squares * COARSE).round_()
            coarse += high.to(torch.int64).sum()
            fine += ((squares - high / COARSE) * FINE).round_().to(torch.int64).sum()
        sums = sum_owned(torch.stack([coarse, fine]), state, partitioned=True).double()
        return (largest * (sums[0] / COARSE + sums[1] / FINE).sqrt()).float().where(largest.isfinite(), torch.inf)
