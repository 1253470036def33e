"""KTO's z0: how far the model is from its reference on prompts with the answers to others, before each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron.callbacks.context import Batches
from megatron.data.batch import StepBatch
from megatron.data.mismatched import Mismatched
from megatron.data.order.data_plan import Datasets
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.forget_steps import TRAIN
from megatron.objectives.kto import LOG_RATIO, REWARD, Z0
from megatron.training.callback import Callback
from megatron.training.engine import Engine
from megatron.training.setup import build_objective
from megatron.training.trainer import Trainer


class ReferencePoint(Callback):
    """Adds z0 to batches: the mean of log p - log p of the reference over the texts of `Mismatched` for the same global
    batch, and 0 where that is below 0. The same for every rank and layout; one pass without gradients.

    `exchanged`: these texts by role.
    """

    engine: Engine

    def __init__(self, args: NeoXArgs, datasets: Datasets, done: tuple[int, int]) -> None:
        """`done`: steps and samples of the training data that the run has behind it."""
        plan, evaluated = BatchPlan.of(args), BatchPlan.constant(args.training.train_batch_size)
        begin = done[1] - plan.samples(done[0])
        self.exchanged = {
            role: Mismatched(dataset, plan, begin) if role == TRAIN else Mismatched(dataset, evaluated)
            for role, dataset in datasets.by_role().items()
        }

    @classmethod
    def of(cls, args: NeoXArgs, datasets: Datasets, done: tuple[int, int]) -> ReferencePoint | None:
        """None where the objective reads no z0."""
        return cls(args, datasets, done) if Z0 in build_objective(args).reads else None

    def start(self, trainer: Trainer) -> None:
        self.engine = trainer.engine

    def add_to(self, batches: Batches, exchanged: Batches) -> Batches:
        """`batches` with z0, each from the batch of `exchanged` for the same step."""

        def steps(consumed: int = 0, step: int | None = None) -> Iterator[StepBatch]:
            for batch, other in zip(batches(consumed, step), exchanged(consumed, step), strict=True):
                yield self._with_z0(batch, other) if REWARD in batch.extras else batch  # a step that is left out

        return steps

    def _with_z0(self, batch: StepBatch, exchanged: StepBatch) -> StepBatch:
        rewards = exchanged.extras[REWARD]
        found = self.engine.eval_batch(replace(exchanged, extras={**exchanged.extras, Z0: torch.zeros_like(rewards)}))
        place = 1 + self.engine.objective.metrics.index(LOG_RATIO)
        z0 = (found.sums[place] / max(found.counts[place], 1)).clamp(min=0)
        return replace(batch, extras={**batch.extras, Z0: z0.expand(rewards.shape)})
