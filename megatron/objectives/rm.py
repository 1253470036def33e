"""`train_impl: rm`: a reward model learns from pairs which of two answers is better.

Legend: t tokens of a micro-batch, n answers, p = n / 2 pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data.answers import ANSWER_TOKENS
from megatron.data.batch import StepBatch
from megatron.data.sample import Sample
from megatron.model.head import RewardOutput
from megatron.objectives import OBJECTIVES, Labels, Objective
from megatron.objectives.answers import split_pairs, sum_by_answer

MARGIN = "margin"


def reward_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, *, z_loss: float = 0.0, centre: float = 0.0
) -> Tensor:
    """Of each pair [p]: -log σ(chosen - rejected - margin), how unlikely the better answer was to win (Bradley and
    Terry 1952), and to win by so much (Touvron et al. 2023, arXiv 2307.09288, section 3.2.2).

    z_loss · (chosen² + rejected²), as in GPT-NeoX, and centre · (chosen + rejected)² (Eisenstein et al. 2023, arXiv
    2312.09244) hold rewards near 0: the first term knows their differences only.
    """
    held = z_loss * (chosen.square() + rejected.square()) + centre * (chosen + rejected).square()
    return held - F.logsigmoid(chosen - rejected - margin)


@OBJECTIVES.register("rm", head="reward", data="pairs")
class RewardModel(Objective):
    """A reward model, from pairs. The reward of an answer is at its one labelled token; both answers of a pair have the
    pair's margin, where the data have margins.
    """

    reads = ("answers", MARGIN)
    counts = ("pairs",)
    metrics = ("accuracy", "margin", "pos_values", "neg_values")

    def problem(self, sample: Sample) -> str | None:
        if sample.labels is None:
            return "every token is trained; make its labels with --for-rm: the reward is read at one token"
        answers = np.zeros_like(sample.labels) if sample.answers is None else sample.answers
        places = np.bincount(answers[1:][(sample.labels[1:] >= 0) & (answers[1:] >= 0)], minlength=answers.max() + 1)
        if (places == 1).all() or not places.any() and sample.length == 1:  # or a row that fills up a batch
            return None
        return (
            f"{places[places != 1][0]} tokens of an answer have a label, and its reward is read at exactly one; make "
            "the labels with --for-rm, and leave out what does not fit (allow_chopped: false)"
        )

    def count(self, batch: StepBatch) -> Sequence[float]:
        return (float(batch.extras[ANSWER_TOKENS].sum()) / 2,)

    def labels(self, batch: StepBatch, micro: int, weights: Tensor) -> tuple[Tensor, ...]:
        if MARGIN not in batch.extras:
            none = torch.zeros_like(batch.extras[ANSWER_TOKENS])
            batch = replace(batch, extras={**batch.extras, MARGIN: none})
        return super().labels(batch, micro, weights)

    def loss(self, out: RewardOutput, labels: Labels) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        margin, there = labels.extras[MARGIN], labels.extras[ANSWER_TOKENS]
        token = torch.arange(labels.mask.numel(), device=labels.mask.device)
        place = sum_by_answer(token * labels.mask.flatten().long(), labels)
        chosen, rejected = split_pairs(out.rewards(place))
        share = there[::2] * labels.weights[0]
        losses = reward_loss(
            chosen, rejected, margin[::2], z_loss=self.options.z_loss, centre=self.options.rm_center_coefficient
        )
        with torch.no_grad():
            metrics = torch.stack(((chosen > rejected).float(), chosen - rejected, chosen, rejected)) @ share
        return out.with_balance((losses * share).sum()), metrics
