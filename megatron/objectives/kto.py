"""`train_impl: kto`: answers that are known to be good or bad, one by one (Ethayarajh et al. 2024, arXiv 2402.01306).

Legend: n answers of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.data.answers import ANSWER_TOKENS
from megatron.data.batch import StepBatch
from megatron.model.head import LMOutput
from megatron.neox_arguments.schema_post import PostConfig
from megatron.objectives import OBJECTIVES, Labels, Objective
from megatron.objectives.answers import sum_trained

REWARD, REFERENCE, Z0 = "reward", "reference", "z0"
LOG_RATIO = "log_ratio"  # the mean of those of the answers to their own prompts
NEUTRAL = 0.001  # a reward that is nearer to 0 says neither good nor bad, as in GPT-NeoX


def kto_loss(log_ratio: Tensor, reward: Tensor, z0: Tensor | float, beta: float) -> Tensor:
    """Of each answer [n]: 1 - σ(β · reward · (log_ratio - z0)), equation 8 of the paper for rewards of +1 and -1.

    log_ratio: the answer's log-probability less that under the reference model. z0: how far the model is from the
    reference on answers in general, in nats; 0 gives `apo_zero_unpaired` (D'Oosterlinck et al. 2024, arXiv 2408.06266).
    """
    return 1 - torch.sigmoid(beta * reward * (log_ratio - z0))


@OBJECTIVES.register("kto", data="rewards")
class Kto(Objective):
    """Good and bad answers, unpaired, against a reference model. Their weights make up for unequal numbers of them:
    (good · kto_desirable_weight) / (bad · kto_undesirable_weight) should be between 1 and 4/3.
    """

    counts = ("rows", "desirable", "undesirable")
    metrics = (LOG_RATIO, "kl", "reward_acc", "chosen_rewards", "rejected_rewards")
    over = {"chosen_rewards": "desirable", "rejected_rewards": "undesirable"}

    def __init__(self, options: PostConfig | None = None) -> None:
        super().__init__(options)
        self.estimates = self.options.kto_loss_type == "kto"
        self.reads = ("answers", REWARD, REFERENCE, *((Z0,) if self.estimates else ()))

    def count(self, batch: StepBatch) -> Sequence[float]:
        if REWARD not in batch.extras:
            return 0, 0, 0
        desirable, undesirable = _classes(batch.extras[REWARD], batch.extras[ANSWER_TOKENS])
        good, bad = float(desirable.sum()), float(undesirable.sum())
        return good + bad, good, bad

    def loss(self, out: LMOutput, labels: Labels) -> tuple[Tensor, Tensor]:
        options, reward = self.options, labels.extras[REWARD]
        z0 = labels.extras[Z0] if self.estimates else torch.zeros_like(reward)
        log_probability = -out.token_loss(labels.targets).view_as(labels.mask)
        log_ratio = sum_trained(log_probability - labels.extras[REFERENCE], labels).float()
        good, bad = _classes(reward, labels.extras[ANSWER_TOKENS])
        rows, of_good, of_bad = labels.weights
        weights = (options.kto_desirable_weight * good + options.kto_undesirable_weight * bad) * rows
        loss = (kto_loss(log_ratio, reward, z0, options.kto_beta) * weights).sum()
        with torch.no_grad():
            each = (good + bad) * rows
            gained = options.kto_beta * log_ratio
            metrics = torch.stack(
                (
                    (log_ratio * each).sum(),
                    (z0 * each).sum(),
                    ((gained * reward > 0) * each).sum(),
                    (gained * good).sum() * of_good,
                    (gained * bad).sum() * of_bad,
                )
            )
        return out.with_balance(loss), metrics


def _classes(reward: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [..., n] of 1 and 0: which answers are good, which bad; those without a trained token are neither."""
    there = tokens > 0
    return ((reward > NEUTRAL) & there).float(), ((reward < -NEUTRAL) & there).float()
