"""`train_impl: normal`: next-token cross entropy."""

from __future__ import annotations

from torch import Tensor

from megatron.model.head import LMOutput
from megatron.objectives import OBJECTIVES, Labels, Objective


@OBJECTIVES.register("normal", doc="Next-token cross entropy.")
class NormalObjective(Objective):
    """Σ mask · (-log p(target)) / trained tokens of the whole global batch. A micro-batch without any adds 0.

    Mixtures of experts add the gradient of their balance loss, a mean over the sequences of the micro-batch, hence over
    those of the global batch.
    """

    def loss(self, out: LMOutput, labels: Labels) -> Tensor:
        """See `Objective`."""
        return out.with_balance(out.weighted_loss(labels.targets, labels.mask * labels.weights[0])[0])
