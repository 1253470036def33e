"""`train_impl: normal`: next-token cross entropy.

Legend: b batch, s sequence.
"""

from __future__ import annotations

from torch import Tensor

from megatron.model.head import LMOutput
from megatron.objectives import OBJECTIVES


class NormalObjective:
    """Σ mask · (-log p(target)) · weight.

    With weight = (accumulation steps · data-parallel size) / N, N the trained tokens of the whole global batch, the
    mean over micro-batches and ranks is Σ / N. A micro-batch without trained tokens adds 0.

    Mixtures of experts add the gradient of their balance loss, a mean over the sequences of the micro-batch, hence over
    those of the global batch.
    """

    batch_keys = ("targets", "mask")

    def loss(self, out: LMOutput, labels: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """labels: targets [b, s] int64 (or numbers to draw them by, see `LMOutput.sampled`), mask [b, s] fp32, weight
        0-dim fp32 -> scalar fp32."""
        targets, mask, weight = labels
        if targets.is_floating_point():  # draws, for an estimate of the curvature
            return out.weighted_loss(out.sampled(targets), mask * weight)[0]
        return out.with_balance(out.weighted_loss(targets, mask * weight)[0])


OBJECTIVES.register("normal", doc="Next-token cross entropy.")(NormalObjective())
