"""KTO's z0: how far the model is from its reference on prompts with the answers to others, before each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron.callbacks.context import Batches
from megatron.data.batch import StepBatch
from megatron.objectives.kto import KL, REWARD, Z0
from megatron.training.callback import Callback
from megatron.training.engine import Engine
from megatron.training.trainer import Trainer


class ReferencePoint(Callback):
    """Adds z0 to batches: the mean of log p / p of the reference over the texts of `data/mismatched.py` for the same
    global batch, and 0 where that is below 0. The same for every rank and layout; one pass without gradients."""

    engine: Engine

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
        place = 1 + self.engine.objective.metrics.index(KL)
        z0 = (found.sums[place] / max(found.counts[place], 1)).clamp(min=0)
        return replace(batch, extras={**batch.extras, Z0: z0.expand(rewards.shape)})
