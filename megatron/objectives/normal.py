"""`train_impl: normal`: next-token cross entropy."""

from __future__ import annotations

from torch import Tensor

from megatron.model.head import LMOutput
from megatron.objectives import OBJECTIVES, Labels, Objective


@OBJECTIVES.register("normal", z_loss=True, doc="Next-token cross entropy.")
class NormalObjective(Objective):
    """Σ mask · (-log p(target)) / trained tokens of the whole global batch. A micro-batch without any adds 0.

    Mixtures of experts add the gradient of their balance loss, a mean over the sequences of the micro-batch, hence over
    those of the global batch.
    """

    def loss(self, out: LMOutput, labels: Labels) -> Tensor:
        """See `Objective`. The targets may be numbers to draw them by (`LMOutput.sampled`)."""
        weights = labels.mask * labels.weights[0]
        if labels.targets.is_floating_point():  # draws, for an estimate of the curvature
            return out.weighted_loss(out.sampled(labels.targets), weights)[0]
        return out.with_balance(out.weighted_loss(labels.targets, weights)[0])
