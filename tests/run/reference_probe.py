"""An objective that shows the reference: trains like `normal`, and reports how far the model is from the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.model.head import LMOutput
from megatron.objectives import OBJECTIVES, Labels, Objective


@OBJECTIVES.register("reference_probe", doc="Cross entropy, and the distance from the reference.")
class ReferenceProbe(Objective):
    """`distance`: mean |log p - log p of the reference| of the trained tokens; `reference`: mean of the latter."""

    reads = ("reference",)
    metrics = ("distance", "reference")

    def loss(self, out: LMOutput, labels: Labels) -> tuple[Tensor, Tensor]:
        losses = out.token_loss(labels.targets).view_as(labels.mask)
        share, reference = labels.mask * labels.weights[0], labels.extras["reference"]
        found = [((-losses.detach() - reference).abs() * share).sum(), (reference * share).sum()]
        return out.with_balance((losses * share).sum()), torch.stack(found)
