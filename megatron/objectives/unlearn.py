"""`train_impl: unlearn`: next-token cross entropy on what is trained or retained, its opposite on what is forgotten.

Legend: b rows of a micro-batch, s sequence, t = b·s, n answers of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data.batch import StepBatch
from megatron.data.order.by_step import KIND
from megatron.data.reference import REFERENCE
from megatron.model.head import LMOutput
from megatron.neox_arguments.forget_steps import FORGET, RETAIN, SOURCES, TRAIN
from megatron.neox_arguments.schema_post import PostConfig
from megatron.objectives import OBJECTIVES, Labels, Objective
from megatron.objectives.answers import sum_by_answer

FROZEN = "frozen_states"
"""The extra of each token of what is retained: the hidden states of the model that the run began with, [b, s, h]."""


@OBJECTIVES.register("unlearn", doc="Steps that forget between ordinary ones; what `ga_dataset` means.")
class UnlearnObjective(Objective):
    """Σ ordinary (-log p) / their number + gd_retain_weight · Σ retained (-log p) / their number + what forgets:

    * ascent: Σ forgotten log p / their number;
    * npo, simnpo: the mean of `npo` or `simnpo` over rows, whose documents share a loss where they hold several;
    * rmu: how far the hidden states behind block ga_rmu_layer are from `steering`; and in place of (-log p) of what is
      retained, how far they are from those of the model that the run began with. Both as `distance`, means over tokens.

    A token's kind is the source it came from; each kind has a mean of its own, so the loss depends on no layout.
    `ga_actual_loss` or `gd_forget_loss` is the cross entropy of what is forgotten, whatever is lowered.
    """

    counts = ("tokens", "retained", "forgotten", "answers")

    def __init__(self, options: PostConfig | None = None) -> None:
        super().__init__(options)
        keys = self.options
        reads = {"simnpo": ("answers",), "npo": ("answers", REFERENCE), "rmu": (FROZEN,)}
        self.reads = (KIND, *reads.get(keys.ga_loss, ()))
        self.inner_layer = keys.ga_rmu_layer if keys.ga_loss == "rmu" else None
        self.forget_loss = "gd_forget_loss" if keys.gd_mode else "ga_actual_loss"
        self.metrics = ("gd_combined_loss" if keys.gd_mode else "ga_objective",)
        if not keys.gd_mode:
            self.metrics += (self.forget_loss,)
        elif keys.gd_log_separate_losses or keys.ga_loss_threshold is not None:
            self.metrics += (self.forget_loss, "gd_retain_loss")
        if keys.ga_loss == "rmu":
            self.metrics += ("rmu_forget_distance", "rmu_retain_distance")
        retained = dict.fromkeys(("gd_retain_loss", "rmu_retain_distance"), "retained")
        self.over = dict.fromkeys(self.metrics, "forgotten") | retained

    def count(self, batch: StepBatch) -> Sequence[float]:
        """Trained tokens of each kind, and answers that are forgotten."""
        batch = self._with_kinds(batch)
        kind, trained = batch.extras[KIND], batch.mask > 0
        tokens = [float((trained & (kind == SOURCES.index(name))).sum()) for name in (TRAIN, RETAIN, FORGET)]
        forgotten = trained & (kind == SOURCES.index(FORGET))
        answers = 0
        if batch.answers is not None and tokens[-1]:
            answers = sum(len(one[there].unique()) for one, there in zip(batch.answers, forgotten, strict=True))
        return (*tokens, float(answers))

    def labels(self, batch: StepBatch, micro: int, weights: Tensor) -> tuple[Tensor, ...]:
        return super().labels(self._with_kinds(batch), micro, weights)

    def _with_kinds(self, batch: StepBatch) -> StepBatch:
        """Data for evaluation are ordinary; where nothing is retained, there are no states to hold."""
        extras = dict(batch.extras)
        if KIND not in extras:
            extras |= {name: torch.zeros_like(batch.mask) for name in (KIND, REFERENCE) if name in self.reads}
        if FROZEN in self.reads and FROZEN not in extras:
            extras[FROZEN] = batch.mask.new_zeros(*batch.mask.shape, 0)
        return replace(batch, extras=extras)

    def loss(self, out: LMOutput, labels: Labels) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        ordinary, retained, forgotten, answers = labels.weights.unbind()
        kind = labels.extras[KIND]
        is_forgotten = (kind == SOURCES.index(FORGET)) * labels.mask
        is_retained = (kind == SOURCES.index(RETAIN)) * labels.mask
        lowered = (kind == SOURCES.index(TRAIN)) * labels.mask * ordinary
        distances: dict[str, Tensor] = {}
        if self.options.ga_loss != "rmu":
            lowered = lowered + is_retained * (retained * self.options.gd_retain_weight)
        if self.options.ga_loss == "ascent":
            loss, losses = out.weighted_loss(labels.targets, lowered - is_forgotten * forgotten)
        elif self.options.ga_loss == "rmu":
            loss, losses = out.weighted_loss(labels.targets, lowered)
            away, held = self._distances(out, labels, is_forgotten * forgotten, is_retained * retained)
            loss = loss + away + self.options.gd_retain_weight * held
            distances = {"rmu_forget_distance": away.detach(), "rmu_retain_distance": held.detach()}
        else:
            losses = out.token_loss(labels.targets)
            each = self._per_answer(losses.view_as(kind), labels, is_forgotten)
            loss = (losses * lowered.reshape(-1)).sum() + each.sum() * answers
            losses = losses.detach()
        losses = losses.view_as(kind)
        means = {
            self.metrics[0]: loss.detach(),  # a step that forgets has no ordinary samples
            self.forget_loss: (losses * is_forgotten).sum() * forgotten,
            "gd_retain_loss": (losses * is_retained).sum() * retained,
            **distances,
        }
        return out.with_balance(loss), torch.stack([means[name] for name in self.metrics])

    def _distances(self, out: LMOutput, labels: Labels, of_forget: Tensor, of_retain: Tensor) -> tuple[Tensor, Tensor]:
        """Those of what is forgotten and of what is retained, 0-dim fp32, by the weights [b, s] of their tokens."""
        keys, hidden = self.options, out.inner_hidden().float()
        target = steering(hidden.shape[-1], keys.ga_rmu_coefficient, keys.ga_rmu_seed).to(hidden)
        away = (distance(hidden, target) * of_forget.flatten()).sum()
        frozen = labels.extras[FROZEN].flatten(0, 1)
        if not frozen.shape[-1]:
            return away, torch.zeros_like(away)
        return away, (distance(hidden, frozen.float()) * of_retain.flatten()).sum()

    def _per_answer(self, losses: Tensor, labels: Labels, is_forgotten: Tensor) -> Tensor:
        """What each answer adds, [n], 0 for those that are not forgotten."""
        keys, log_probs = self.options, -losses
        if keys.ga_loss == "npo":
            log_probs = log_probs - labels.extras[REFERENCE]
        sums, tokens = sum_by_answer(log_probs.double() * is_forgotten, labels), sum_by_answer(is_forgotten, labels)
        if keys.ga_loss == "npo":
            each = npo(sums, keys.ga_beta)
        else:
            each = simnpo(sums / tokens.clamp(min=1), keys.ga_beta, keys.ga_gamma)
        return (each * (tokens > 0)).float()


def steering(size: int, coefficient: float, seed: int) -> Tensor:
    """What representation misdirection (Li et al. 2024, arXiv 2403.03218) moves the hidden states of forgotten tokens
    to: `coefficient` times a unit vector, whose direction is drawn uniformly from [0, 1)^size; fp32 [size]."""
    drawn = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (coefficient * drawn / drawn.norm()).float()


def distance(hidden: Tensor, target: Tensor) -> Tensor:
    """Mean over features of squared differences, [t, h] and [t, h] or [h] -> [t], as in that paper's code."""
    return (hidden - target).square().mean(-1)


def npo(ratios: Tensor, beta: float) -> Tensor:
    """Negative preference optimisation (Zhang et al. 2024, arXiv 2404.05868), nats -> [n].

    Args:
        ratios: log-probability of each answer less that of the reference model, [n].
    """
    return F.softplus(beta * ratios) * (2 / beta)


def simnpo(means: Tensor, beta: float, gamma: float) -> Tensor:
    """The same without a reference (Fan et al. 2024, arXiv 2410.07163), nats -> [n].

    Args:
        means: log-probability of each answer per token, [n].
    """
    return F.softplus(beta * means + gamma) * (2 / beta)
