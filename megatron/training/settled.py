"""What a step came to, as numbers on the host."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.engine import StepOut
from megatron.training.late import LateNumbers


@dataclass(frozen=True)
class Settled:
    """A step whose outcome is known.

    Attributes:
        step: its number; the first is 1.
        loss: of the step; NaN or infinite where the numbers went bad.
        skipped, trained_tokens, loss_scale, grad_norm: see `StepOut`.
        outlier: the update was skipped for that.
    """

    step: int
    loss: float
    skipped: bool
    trained_tokens: int
    loss_scale: float | None
    grad_norm: float | None = None
    outlier: bool = False


class Unsettled:
    """A step whose outcome is still being worked out."""

    def __init__(self, step: int, out: StepOut) -> None:
        self._step, self._out = step, out
        given = (out.loss, out.skipped, out.grad_norm, out.outlier)
        self._numbers = LateNumbers([0.0 if number is None else number for number in given])

    def settle(self) -> Settled:
        """Wait for the outcome."""
        loss, skipped, norm, outlier = self._numbers.read()
        grad_norm = None if self._out.grad_norm is None else norm
        tokens, scale = self._out.trained_tokens, self._out.loss_scale
        return Settled(self._step, loss, bool(skipped), tokens, scale, grad_norm, bool(outlier))
