"""`train_impl: distill`: towards the next-token distributions of another model, the teacher.

Legend: b rows, s sequence, t = b·s, c tokens of a chunk, v vocabulary, k tokens of the teacher's that are known.

With p the teacher's and q the student's distribution at temperature T (Hinton et al. 2015), T² times

| distill_loss | divergence                                | Source                                   |
|--------------|-------------------------------------------|------------------------------------------|
| forward_kl   | KL(p ‖ q)                                 | Hinton et al. 2015, arXiv 1503.02531     |
| reverse_kl   | KL(q ‖ p)                                 | Gu et al. 2023, arXiv 2306.08543         |
| jsd          | β KL(p ‖ m) + (1 - β) KL(q ‖ m),          | Agarwal et al. 2023, arXiv 2306.13649, 1 |
|              | m = β p + (1 - β) q                       |                                          |

Of a teacher whose k likeliest tokens are known, all others count as one.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from megatron.data.reference import TEACHER_IDS, TEACHER_LOGPROBS
from megatron.model.head import LMOutput
from megatron.objectives import OBJECTIVES, Labels, Objective

TEACHER_HIDDEN = "teacher_hidden"
"""The extra with the teacher's hidden states behind its block of distill_layers, [b, s, the teacher's h]. What this
module defines does not read it; an objective of a plugin may."""
_CERTAIN = -1e-7  # log of a sum of probabilities that leaves nothing for the others, in fp32


def divergence(student: Tensor, teacher: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """Log-probabilities [..., n] of the same n cases -> [...]; see the table above."""
    if kind == "forward_kl":
        return (teacher.exp() * (teacher - student)).sum(-1)
    if kind == "reverse_kl":
        return (student.exp() * (student - teacher)).sum(-1)
    mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * (teacher.exp() * (teacher - mixed)).sum(-1) + (1 - beta) * (student.exp() * (student - mixed)).sum(-1)


def with_rest(logprobs: Tensor) -> Tensor:
    """[..., k] -> [..., k + 1]: and the log-probability of all other tokens together."""
    inside = torch.logsumexp(logprobs, -1, keepdim=True).clamp(max=_CERTAIN)
    return torch.cat([logprobs, torch.log(-torch.expm1(inside))], -1)


@OBJECTIVES.register("distill", data="teacher", doc="Next-token distributions of a teacher (distill_*).")
class DistillObjective(Objective):
    """distill_weight · divergence + (1 - distill_weight) · cross entropy, a mean over the trained tokens.

    Reads the teacher's log-probabilities [b, s, k] and the ids of these tokens [b, s, k], which has no columns where
    they are those of the whole vocabulary.
    """

    reads: tuple[str, ...] = (TEACHER_IDS, TEACHER_LOGPROBS)
    counts = ("targets",)  # that are trained; no nats per token of the data
    metrics: ClassVar[tuple[str, ...]] = ("divergence", "cross_entropy")

    def loss(self, out: LMOutput, labels: Labels) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        options = self.options
        weights = labels.mask * labels.weights[0]
        share = options.distill_weight

        def apart(logits: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
            student = torch.log_softmax(logits / options.distill_temperature, -1)
            if ids.shape[-1]:
                student, teacher = with_rest(student.gather(-1, ids.long())), with_rest(teacher)
            return divergence(student, teacher, options.distill_loss, options.distill_jsd_beta)

        flat = (labels.extras[name].flatten(0, 1) for name in (TEACHER_IDS, TEACHER_LOGPROBS))
        each = options.distill_temperature**2 * out.map_logits(apart, *flat)
        soft = (each * weights.flatten()).sum()
        hard, _ = out.weighted_loss(labels.targets, weights)
        loss = share * soft + (1 - share) * hard
        return out.with_balance(loss), torch.stack([soft.detach(), hard.detach().float()])
