"""Steps whose loss or gradient norm lies far outside those before: decided on the device, so that nobody waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

VALUES = ("loss", "grad_norm")


class Window:
    """The last finite values of some numbers, and how far above them a new value may lie.

    Args:
        size: values kept of each.
        sigma: standard deviations (of the sample: n - 1) above the mean.
        count: of the numbers.

    Attributes:
        values: fp64 `[count, size]`, the newest last; NaN where there is none yet.
    """

    def __init__(self, size: int, sigma: float, count: int, device: torch.device | str = "cpu") -> None:
        self.size, self.sigma = size, sigma
        self.values = torch.full((count, size), torch.nan, dtype=torch.float64, device=device)

    def limits(self) -> Tensor:
        """fp64 `[count]`: mean + sigma standard deviations; infinite until half of the window is filled."""
        there = ~self.values.isnan()
        count = there.sum(dim=1)
        known = self.values.nan_to_num()
        mean = known.sum(dim=1) / count
        squares = torch.where(there, known - mean[:, None], 0.0).square().sum(dim=1)
        limits = mean + self.sigma * (squares / (count - 1)).sqrt()
        return torch.where(count >= max(2, self.size // 2), limits, torch.inf)

    def add(self, now: Tensor) -> None:
        """Keep these values (fp64 `[count]`), unless one is not finite."""
        moved = torch.cat([self.values[:, 1:], now[:, None]], dim=1)
        self.values = torch.where(now.isfinite().all(), moved, self.values)

    def state(self) -> list[list[float]]:
        """The values there are, oldest first. Waits for the device."""
        return [[x for x in row if x == x] for row in self.values.tolist()]

    def load(self, saved: Sequence[Sequence[float]]) -> None:
        """Take back what `state` gave, of a window of any size."""
        self.values.fill_(torch.nan)
        for row, values in zip(self.values, saved, strict=True):
            if kept := list(values)[-self.size :]:
                row[-len(kept) :] = torch.tensor(kept, dtype=torch.float64)


class Outliers:
    """Which steps are outliers: those whose loss or gradient norm is above the limit of its `Window`.

    The window holds the steps before, outliers among them: what lasts becomes the new normal after a few steps (with
    128 and 6 after four), instead of ending all training.
    """

    def __init__(self, window: int, sigma: float, device: torch.device | str) -> None:
        self._window = Window(window, sigma, len(VALUES), device)

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether this step is an outlier, 0-dim bool; it is one of those before from now on. What is not finite is
        none, and is not kept. The same on every rank, because loss and norm are."""
        now = torch.stack([loss.double(), norm.double()])
        outlier = (now > self._window.limits()).any() & now.isfinite().all()
        self._window.add(now)
        return outlier

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint keeps. Waits for the device."""
        return dict(zip(VALUES, self._window.state(), strict=True))

    def load(self, saved: Mapping[str, Sequence[float]] | None) -> None:
        """Take back what `state` gave; None, of a run without this, begins with an empty window."""
        self._window.load([saved[name] for name in VALUES] if saved else [[]] * len(VALUES))
