"""`train_impl: dpo`: preferences as a loss of log-probabilities, without a reward model.

Legend: p pairs of a micro-batch, n = 2p answers, t tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data.answers import ANSWER_TOKENS, TRAINED_PLACES
from megatron.data.batch import StepBatch
from megatron.model.head import LMOutput
from megatron.neox_arguments.rules_reference import pairs_compare
from megatron.neox_arguments.schema_post import PostConfig
from megatron.objectives import OBJECTIVES, Labels, Objective
from megatron.objectives.answers import split_pairs, sum_trained


@dataclass(frozen=True)
class Pairs:
    """The model's log-probabilities of the answers of pairs, `[p]` each: sums over trained tokens.

    * `chosen`, `rejected`: of the model; `chosen_ratio`, `rejected_ratio`: minus those of the reference.
    * `chosen_tokens`, `rejected_tokens`: how many tokens, at least 1.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_ratio: Tensor
    rejected_ratio: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def margin(self) -> Tensor:
        return self.chosen_ratio - self.rejected_ratio

    @property
    def mean_margin(self) -> Tensor:
        """`margin` with means over tokens in place of sums."""
        return self.chosen_ratio / self.chosen_tokens - self.rejected_ratio / self.rejected_tokens


def _cross_entropy(margin: Tensor, smoothing: float) -> Tensor:
    """-log σ(margin), where a share `smoothing` of the preferences is the other way round."""
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _sigmoid(pairs: Pairs, options: PostConfig) -> Tensor:
    """DPO (Rafailov et al. 2023, arXiv 2305.18290, eq. 7); with label smoothing cDPO (Mitchell 2023)."""
    return _cross_entropy(options.dpo_beta * pairs.margin, options.dpo_label_smoothing)


def _robust(pairs: Pairs, options: PostConfig) -> Tensor:
    """Its expectation is DPO's loss where a share of the preferences is flipped (arXiv 2403.00409, eq. 5)."""
    smoothing, margin = options.dpo_label_smoothing, options.dpo_beta * pairs.margin
    kept, flipped = F.logsigmoid(margin), F.logsigmoid(-margin)
    return (-(1 - smoothing) * kept + smoothing * flipped) / (1 - 2 * smoothing)


def _sigmoid_norm(pairs: Pairs, options: PostConfig) -> Tensor:
    """DPO with means over tokens (Tülu 3, arXiv 2411.15124, eq. 6)."""
    return _cross_entropy(options.dpo_beta * pairs.mean_margin, options.dpo_label_smoothing)


def _hinge(pairs: Pairs, options: PostConfig) -> Tensor:
    """SLiC's loss of the same margin (arXiv 2309.06657)."""
    return torch.relu(1 - options.dpo_beta * pairs.margin)


def _ipo(pairs: Pairs, options: PostConfig) -> Tensor:
    """IPO (Azar et al. 2023, arXiv 2310.12036, eq. 17), of means over tokens as its authors have it."""
    return (pairs.mean_margin - 1 / (2 * options.dpo_beta)).square()


def _apo_zero(pairs: Pairs, options: PostConfig) -> Tensor:
    """Chosen answers become likelier, rejected ones less likely (APO, arXiv 2408.06266, eq. 7)."""
    beta = options.dpo_beta
    return 1 - torch.sigmoid(beta * pairs.chosen_ratio) + torch.sigmoid(beta * pairs.rejected_ratio)


def _apo_down(pairs: Pairs, options: PostConfig) -> Tensor:
    """Both become less likely, rejected ones more so (APO, eq. 8)."""
    beta = options.dpo_beta
    return torch.sigmoid(beta * pairs.chosen_ratio) + 1 - torch.sigmoid(beta * pairs.margin)


def _simpo(pairs: Pairs, options: PostConfig) -> Tensor:
    """Means over tokens without a reference, and a target margin (SimPO, arXiv 2405.14734, eq. 6)."""
    margin = options.dpo_beta * pairs.mean_margin - options.dpo_simpo_gamma
    return _cross_entropy(margin, options.dpo_label_smoothing)


def _orpo(pairs: Pairs, options: PostConfig) -> Tensor:
    """The ratio of odds (ORPO, arXiv 2403.07691, eq. 7), which stands beside the loss of the chosen answers."""
    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    odds = (chosen - _log1mexp(chosen)) - (rejected - _log1mexp(rejected))
    return -options.dpo_beta * F.logsigmoid(odds)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0; finite at 0, where an answer has no tokens or no alternative."""
    return torch.log(-torch.expm1(x.clamp(max=-1e-12)))


LOSSES: dict[str, Callable[[Pairs, PostConfig], Tensor]] = {
    "sigmoid": _sigmoid,
    "cdpo": _sigmoid,
    "robust": _robust,
    "sigmoid_norm": _sigmoid_norm,
    "hinge": _hinge,
    "ipo": _ipo,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "simpo": _simpo,
    "orpo": _orpo,
}
"""Loss of each pair `[p]`, by `dpo_loss_type`."""


@OBJECTIVES.register("dpo", data="pairs", doc="Preference pairs: DPO and its kin, `dpo_loss_type`.")
class DPOObjective(Objective):
    """Mean over the pairs of the global batch of `LOSSES`, and `dpo_sft_loss_weight` times the mean over the trained
    tokens of chosen answers of -log p. Pairs of which nothing is trained are not counted.

    Reads `reference`, the log-probability of each token by the reference model, unless there is none.
    """

    counts = ("pairs", "chosen_tokens")
    metrics = (
        "chosen_rewards",
        "rejected_rewards",
        "reward_acc",
        "margins",
        "chosen_pos",
        "chosen_neg",
        "ref_pos",
        "ref_neg",
        "chosen_nll",
    )
    over = {"chosen_nll": "chosen_tokens"}

    def __init__(self, options: PostConfig | None = None) -> None:
        super().__init__(options)
        keys = self.options
        compares = pairs_compare(lambda name: getattr(keys, name))
        self.reads = ("answers", TRAINED_PLACES, *(["reference"] if compares else []))
        weight = keys.dpo_sft_loss_weight
        self.sft_weight = float(keys.dpo_loss_type == "orpo") if weight is None else weight

    def count(self, batch: StepBatch) -> Sequence[float]:
        """See `Objective`."""
        chosen, rejected = split_pairs(batch.extras[ANSWER_TOKENS])
        return int((chosen + rejected > 0).sum()), float(chosen.sum())

    def loss(self, out: LMOutput, labels: Labels) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        sums = -sum_trained(out.token_loss(labels.targets, labels.extras[TRAINED_PLACES]), labels)
        reference = labels.extras.get("reference")
        known = torch.zeros_like(sums) if reference is None else sum_trained(reference, labels)
        pairs, counted = pairs_of(sums, known, labels.extras[ANSWER_TOKENS])
        by_pairs, by_tokens = labels.weights[0] * counted, labels.weights[1]
        nll = -pairs.chosen.sum() * by_tokens
        loss = (LOSSES[self.options.dpo_loss_type](pairs, self.options) * by_pairs).sum()
        loss = loss + self.sft_weight * nll
        with torch.no_grad():
            beta = self.options.dpo_beta
            references = split_pairs(known)
            rewards = torch.stack([beta * pairs.chosen_ratio, beta * pairs.rejected_ratio])
            means = [*rewards, rewards[0] > rewards[1], rewards[0] - rewards[1], pairs.chosen, pairs.rejected]
            metrics = torch.stack([(mean * by_pairs).sum() for mean in (*means, *references)] + [nll])
        return out.with_balance(loss.float()), metrics.float()


def pairs_of(sums: Tensor, reference: Tensor, tokens: Tensor) -> tuple[Pairs, Tensor]:
    """Pairs of sums of log-probabilities, of the reference's, and of numbers of tokens `[n]`; and whether each pair has
    tokens `[p]`."""
    chosen, rejected = split_pairs(sums)
    chosen_reference, rejected_reference = split_pairs(reference)
    chosen_tokens, rejected_tokens = split_pairs(tokens)
    ratios = chosen - chosen_reference, rejected - rejected_reference
    pairs = Pairs(chosen, rejected, *ratios, chosen_tokens.clamp(min=1), rejected_tokens.clamp(min=1))
    return pairs, chosen_tokens + rejected_tokens > 0
