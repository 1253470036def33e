"""What is trained: one objective per `train_impl`.

Legend: b rows of a micro-batch, s sequence, t = b·s, n answers of a micro-batch, k counts, m metrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.data.answers import ANSWER_TOKENS
from megatron.data.batch import StepBatch
from megatron.data.sample import Sample
from megatron.errors import UserError
from megatron.model.head import LMOutput
from megatron.neox_arguments.schema_post import PostConfig
from megatron.registry import Registry, import_entries


@dataclass(frozen=True)
class Labels:
    """What the loss of a micro-batch is worked out from, next to the output.

    Attributes:
        targets: int64 `[b, s]`.
        mask: fp32 `[b, s]`, 1 where the target is trained.
        weights: fp32 `[k]`, one for each of `Objective.counts`: (micro-batches · data ranks) / what is counted in the
            whole global batch, 0 where nothing is. A sum times its weight is, in the mean over micro-batches and data
            ranks that engines take, a mean over what is counted. In evaluation they are 1: engines add up.
        extras: what `Objective.reads` names, as `StepBatch` has it, of this micro-batch: `[b, s]` or `[n]`; with
            "answers" also "answer_tokens".
    """

    targets: Tensor
    mask: Tensor
    weights: Tensor
    extras: Mapping[str, Tensor]

    @property
    def answers(self) -> Tensor:
        """int64 `[b, s]`, the answer of each target, -1 where there is none; their number is the length of extras per
        answer."""
        return self.extras["answers"]


class Objective(ABC):
    """A loss, what it reads, what it is a mean over, what it reports. Shared by all stages, without parameters.

    Attributes:
        reads: names of the extras of a batch that it reads, "answers" for the answers.
        counts: what it counts. The first is what its loss is a mean over; "tokens" there means nats per token, of which
            perplexity is made.
        metrics: names of the means that it reports besides the loss, as `train/<name>` and `<split>/<name>`.
        over: which of the counts a metric is a mean over, where that is not the first.
        inner_layer: the block, from 0, whose output `LMOutput.inner_hidden` gives; None: none.
    """

    reads: tuple[str, ...] = ()
    counts: tuple[str, ...] = ("tokens",)
    metrics: tuple[str, ...] = ()
    over: Mapping[str, str] = {}
    inner_layer: int | None = None

    def __init__(self, options: PostConfig | None = None) -> None:
        self.options = options or PostConfig()

    def count(self, batch: StepBatch) -> Sequence[float]:
        """What `counts` names in this rank's part of a step, on the host; it is added up over ranks before the step's
        first forward pass. A step in which nothing is counted is skipped."""
        return (batch.trained,)

    def problem(self, sample: Sample) -> str | None:
        """Why nothing can be learnt from a sample, for a message that names its document; None where it can."""
        return None

    @abstractmethod
    def loss(self, out: LMOutput, labels: Labels) -> Tensor | tuple[Tensor, Tensor]:
        """A micro-batch's share of the step's loss: 0-dim fp32 with a gradient for every parameter (`out.with_balance`
        adds that of mixtures of experts), 0 and not NaN where nothing is counted. With `metrics` also their shares,
        fp32 `[m]` without gradient. Every term has one of `labels.weights` as a factor, and so depends on no layout.
        """

    # -- what engines call

    def __call__(self, out: LMOutput, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(loss, metrics `[m]`) of what `labels` gave."""
        targets, mask, weights, *extras = tensors
        labels = Labels(targets, mask, weights, dict(zip(self._extras, extras, strict=True)))
        found = self.loss(out, labels)
        loss, metrics = found if isinstance(found, tuple) else (found, mask.new_zeros(0))
        if self.inner_layer is not None and out.inner is not None:
            # A stage before waits for its gradient, whatever is made of it.
            loss = loss + 0 * out.inner.reshape(-1)[0].float()
        return loss, metrics

    def labels(self, batch: StepBatch, micro: int, weights: Tensor) -> tuple[Tensor, ...]:
        """Those of a micro-batch, as tensors: pipelines send nothing else."""
        known = batch.extras if batch.answers is None else {**batch.extras, "answers": batch.answers}
        if missing := [name for name in self._extras if name not in known]:
            raise UserError(
                f"the objective {type(self).__name__} reads {', '.join(missing)}, which the data do not have"
            )
        return batch.targets[micro], batch.mask[micro], weights, *(known[name][micro] for name in self._extras)

    def counted(self, batch: StepBatch) -> Sequence[float]:
        """`count`, or what was counted before the batch went to the device."""
        return self.count(batch) if batch.counts is None else batch.counts

    def divisors(self, counts: Sequence[float]) -> tuple[float, ...]:
        """Of these counts, what the loss and each metric are means over, `[1 + m]`."""
        by_name = dict(zip(self.counts, counts, strict=True))
        return (counts[0], *(by_name[self.over.get(name, self.counts[0])] for name in self.metrics))

    @property
    def _extras(self) -> tuple[str, ...]:
        return (*self.reads, *([ANSWER_TOKENS] if "answers" in self.reads else []))


def measured(loss: Tensor, metrics: Tensor) -> Tensor:
    """Loss and metrics as one vector `[1 + m]` fp32 without gradient: they travel together."""
    return torch.cat([loss.detach().float().reshape(1), metrics])


OBJECTIVES: Registry[type[Objective]] = Registry(
    "train_impl",
    wants="a subclass of megatron.objectives.Objective",
    fits=lambda entry: isinstance(entry, type) and issubclass(entry, Objective),
    fields=("head", "data", "z_loss"),
)
"""Subclasses of `Objective`, which are made with the keys about post-training (`args.post`).

`head`: what the last layer gives, where that is not logits: `reward`. `data`: what is learnt from, where it is not
texts alone: `pairs`, texts with `rewards`, the model's own `rollouts`, or what a `teacher` (distill_teacher) says
of texts. `z_loss`: whether z_loss_weight is for it:
its loss is a `LMOutput.weighted_loss`, which adds the z-loss, and neither scales nor lowers it.
"""


import_entries(__name__, __path__)
