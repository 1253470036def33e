"""Losses on completions that the model itself wrote: `train_impl: reinforce`, `rloo` and `grpo`.

Legend: b rows, each one completion behind its prompt; s sequence; t = b·s. Values are per target, log-probabilities in
nats, of the distribution from which the completions were drawn (its temperature included).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megatron.data.answers import TRAINED_PLACES
from megatron.data.batch import StepBatch
from megatron.model.head import LMOutput
from megatron.neox_arguments.schema_post import PostConfig
from megatron.objectives import OBJECTIVES, Labels, Objective
from megatron.objectives.advantages import group_relative, leave_one_out, moving_baseline

FULL = "reference_distribution"
"""The extra [gas, b, s, v] of `kl_impl: full`: log-probabilities of the whole vocabulary by the reference."""


def kl_estimate(kind: str, difference: Tensor) -> Tensor:
    """Estimates of KL(model || reference) from log-probabilities of a drawn token, elementwise.

    Source: Schulman 2020, "Approximating KL divergence": kl (k1), mse (k2), k3; abs is GPT-NeoX's. The mean of kl and
    k3 is the divergence, that of the gradient of mse its gradient.

    Args:
        kind: "kl" d, "mse" d²/2, "k3" exp(-d) - 1 + d, "abs" |d|.
        difference: d, log p of the model less that of the reference.
    """
    if kind == "kl":
        return difference
    if kind == "mse":
        return difference.square() / 2
    if kind == "abs":
        return difference.abs()
    if kind == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"no estimate of the divergence is called {kind!r}")


def full_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL(model || reference) of distributions: log-probabilities [..., v] -> [...]."""
    return (logprobs.exp() * (logprobs - reference)).sum(dim=-1)


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(loss, whether the clip holds it back), elementwise: -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(log_ratio).

    Source: Schulman et al. 2017, PPO, equation 7; two ends as in Yu et al. 2025, DAPO.
    """
    ratio = log_ratio.exp()
    held = ((ratio > 1 + high) & (advantage > 0)) | ((ratio < 1 - low) & (advantage < 0))
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage), held


class PolicyObjective(Objective):
    """What the three have in common. A completion without a reward is not trained; of the others every token counts.

    Attributes:
        reference: it needs log-probabilities of the weights that the run began with.
    """

    counts = ("rows", "tokens")
    metrics = ("kl", "clipped", "sampler_difference")
    over: ClassVar[Mapping[str, str]] = dict.fromkeys(metrics, "tokens")
    kl_in_reward: ClassVar[bool] = False

    def __init__(self, options: PostConfig | None = None) -> None:
        super().__init__(options)
        one = self.options
        self.beta, self.temperature = one.kl_div_beta, one.rollout_temperature
        self.reference = self.beta > 0
        self.low = one.grpo_epsilon
        self.high = self.low if one.grpo_epsilon_high is None else one.grpo_epsilon_high

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        """What its keys need."""
        compared = FULL if self.options.kl_impl == "full" and not self.kl_in_reward else "reference"
        return ("advantage", "old", TRAINED_PLACES, *([compared] if self.reference else []))

    def count(self, batch: StepBatch) -> Sequence[float]:
        """Completions with trained tokens, and these."""
        return float(batch.mask.any(dim=-1).sum()), batch.trained

    @abstractmethod
    def advantages(self, rewards: np.ndarray, means: Sequence[float]) -> tuple[np.ndarray, list[float]]:
        """Advantages [p, k] of rewards [p, k], and what to remember in place of `means` (see `moving_baseline`)."""

    def penalty(self, logprobs: Sequence[float] | None, reference: Sequence[float] | None) -> float:
        """What a completion's reward is less for its distance from the reference."""
        return 0.0

    def loss(self, out: LMOutput, labels: Labels) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        out_at = out.at_temperature(self.temperature)
        mask = labels.mask
        # Of completions alone: prompts and padding do not pass through the output matrix.
        logprobs = -out_at.token_loss(labels.targets, labels.extras[TRAINED_PLACES]).view(mask.shape)
        # Where nothing is trained the extras are 0, and a difference from them could be anything.
        difference = torch.where(mask > 0, logprobs - labels.extras["old"], 0.0)
        loss, held = self.policy_loss(logprobs, difference, labels)
        kl = torch.zeros_like(logprobs)
        if self.reference:
            kl = self._kl(out_at, logprobs, labels)
        if self.reference and not self.kl_in_reward:
            loss = loss + self.share(self.beta * kl, labels)
        tokens = mask * labels.weights[1]
        reported = [(values.detach() * tokens).sum() for values in (kl, held, difference.abs())]
        return out.with_balance(loss), torch.stack(reported)

    def _kl(self, out: LMOutput, logprobs: Tensor, labels: Labels) -> Tensor:
        if FULL in labels.extras:
            return full_kl(out.logits().log_softmax(dim=-1), labels.extras[FULL])
        return kl_estimate(
            self.options.kl_impl, torch.where(labels.mask > 0, logprobs - labels.extras["reference"], 0.0)
        )

    @abstractmethod
    def policy_loss(self, logprobs: Tensor, difference: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
        """(scalar, which values the clip holds back [b, s]) from log-probabilities [b, s] and how far they are from
        those of the draws."""

    def share(self, values: Tensor, labels: Labels) -> Tensor:
        """The micro-batch's share of the step's mean of values [b, s]: that over all tokens."""
        return (values * labels.mask).sum() * labels.weights[1]


@OBJECTIVES.register("reinforce", data="rollouts")
class Reinforce(PolicyObjective):
    """-log p · advantage + kl_div_beta · KL, a mean over all tokens of the global batch. The baseline of a reward is
    the mean of the last 100 prompts, or with `reinforce_leave_one_out` that of the prompt's other completions."""

    def advantages(self, rewards: np.ndarray, means: Sequence[float]) -> tuple[np.ndarray, list[float]]:
        if self.options.reinforce_leave_one_out:
            return leave_one_out(rewards), []
        return moving_baseline(rewards, means)

    def policy_loss(self, logprobs: Tensor, difference: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
        return self.share(-logprobs * labels.extras["advantage"], labels), torch.zeros_like(logprobs, dtype=torch.bool)


@OBJECTIVES.register("rloo", data="rollouts")
class Rloo(PolicyObjective):
    """The clipped surrogate of whole completions, a mean over them. The reward of each is its own less kl_div_beta
    times the sum of log p - log p of the reference, its baseline the mean of the prompt's other completions.

    Source: Ahmadian et al. 2024, "Back to Basics"; TRL's RLOOTrainer.
    """

    kl_in_reward = True

    def advantages(self, rewards: np.ndarray, means: Sequence[float]) -> tuple[np.ndarray, list[float]]:
        return leave_one_out(rewards), []

    def penalty(self, logprobs: Sequence[float] | None, reference: Sequence[float] | None) -> float:
        if not self.reference or logprobs is None or reference is None:
            return 0.0
        return self.beta * (sum(logprobs) - sum(reference))

    def policy_loss(self, logprobs: Tensor, difference: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
        mask, lengths = labels.mask, labels.mask.sum(dim=1)
        advantage = (labels.extras["advantage"] * mask).sum(dim=1) / lengths.clamp(min=1.0)  # the same for all
        loss, held = clipped_surrogate((difference * mask).sum(dim=1), advantage, self.low, self.high)
        loss = (loss * (lengths > 0)).sum() * labels.weights[0]
        return loss, held[:, None].expand_as(mask)


@OBJECTIVES.register("grpo", data="rollouts")
class Grpo(PolicyObjective):
    """The clipped surrogate of tokens + kl_div_beta · KL. Rewards of a prompt are made relative to each other
    (`grpo_scale_rewards`); `grpo_loss` says what the loss is a mean over.

    Source: Shao et al. 2024, DeepSeekMath; Yu et al. 2025, DAPO; Liu et al. 2025, Dr. GRPO; TRL's GRPOTrainer.
    """

    def advantages(self, rewards: np.ndarray, means: Sequence[float]) -> tuple[np.ndarray, list[float]]:
        return group_relative(rewards, self.options.grpo_scale_rewards), []

    def policy_loss(self, logprobs: Tensor, difference: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
        loss, held = clipped_surrogate(difference, labels.extras["advantage"], self.low, self.high)
        return self.share(loss, labels), held

    def share(self, values: Tensor, labels: Labels) -> Tensor:
        if self.options.grpo_loss == "dapo":
            return super().share(values, labels)
        sums = (values * labels.mask).sum(dim=1)
        lengths = (
            labels.mask.sum(dim=1).clamp(min=1.0) if self.options.grpo_loss == "grpo" else self.options.rollout_tokens
        )
        return (sums / lengths).sum() * labels.weights[0]
