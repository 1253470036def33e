"""One optimizer step of one data-parallel rank's batch: what every engine does around its forward and backward passes.

Shapes: `g` micro-batches of a step (gradient accumulation), `b` micro-batch, `s` sequence.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.data.batch import StepBatch
from megatron.layers.carry import Carry
from megatron.layers.documents import Documents
from megatron.layers.kv_cache import KVCache
from megatron.layers.lora import switched_off
from megatron.model.head import Then
from megatron.model.sequential import run_stage
from megatron.mpu.sampled_targets import draws
from megatron.mpu.state import ParallelState
from megatron.training.compile import without_compile
from megatron.training.engine import StepOut
from megatron.training.engine_by_name import StateByName
from megatron.training.engine_update import Update, clip_and_step
from megatron.training.outliers import Outliers


class StepEngine(StateByName):
    """The half of an engine that steps. Whoever makes one from it sets `module`, `_params`, `_gradients` and
    `_optimizer_state` besides.

    Args:
        state: this rank's place in the layout.
        precision: "fp32", "bfloat16" or "fp16".
        max_norm: clip the global gradient norm to this; 0 = off.
        micro_batches: of a step, until one has another number of them.
    """

    module: Any  # an nn.Module; what else it has depends on the engine
    joint_passes = False

    def __init__(self, state: ParallelState, *, precision: str, max_norm: float, micro_batches: int) -> None:
        self.state = state
        self.precision = precision
        self.max_norm = max_norm
        self.micro_batches = micro_batches
        self.before_update: Callable[[], None] | None = None
        self.outliers: Outliers | None = None
        self.beat: Callable[[], None] = lambda: None
        self.votes: Callable[[], Sequence[bool]] = tuple
        self.waited = 0.0
        self._update: Update | None = None
        self._await_weights = lambda: None

    @abstractmethod
    def _forward_backward(self, micro_batches: Iterator[tuple[Any, Any]]) -> Tensor:
        """All passes of a step and the update (`_take_update`). Returns the mean loss of the micro-batches of all data
        ranks, 0-dim fp32, on every rank."""

    @abstractmethod
    def _forward(self, inputs: Any, labels: Any) -> Tensor:
        """The loss of one micro-batch, 0-dim, where the model is one stage."""

    @abstractmethod
    def _set_micro_batches(self) -> None:
        """Steps have `self.micro_batches` from here on."""

    def train_batch(self, batch: StepBatch, lr: float) -> StepOut:
        """Forward, backward and update over a whole step. The same call on every rank.

        Args:
            batch: this data rank's share of the global batch.
            lr: learning rate of this step.
        """
        trained, padding, *counts = self._counts(batch, self.votes())
        votes = tuple(count > 0 for count in counts)
        if trained == 0:
            # Decided before any forward: a mean over nothing would be NaN.
            nothing = torch.zeros((), device=self.state.device)
            return StepOut(nothing, None, nothing == 0, 0, self._loss_scale(), padding, votes)
        self._optimizer_state.set_lr(lr)
        if len(batch.tokens) != self.micro_batches:
            self.micro_batches = len(batch.tokens)
            self._set_micro_batches()
        weight = self.micro_batches * self.state.dp_size / trained
        if self._optimizer_state.wants_curvature(batch.step):
            drawn = replace(batch, targets=draws(batch.tokens, batch.step))
            with self._optimizer_state.estimating_curvature(trained):
                self._forward_backward(self._micro_batches(drawn, weight))
        self._update = None
        loss = self._forward_backward(self._micro_batches(batch, weight))
        update = self._update
        assert update is not None, "a step ended without an update"
        not_finite = update.skipped if update.outlier is None else update.skipped & ~update.outlier
        self.skipped_steps = self.skipped_steps + not_finite
        scale = self._loss_scale()
        return StepOut(loss.detach(), update.norm, update.skipped, trained, scale, padding, votes, update.outlier)

    def _take_update(self, loss: Tensor) -> Update:
        """Clip and step with the gradients of the whole step, whose loss is the one that is reported."""
        if self._optimizer_state.estimates_curvature:
            return clip_and_step(self._gradients, self.state, max_norm=0.0, loss_scale=self._loss_scale() or 1.0)
        self._update = clip_and_step(
            self._gradients,
            self.state,
            max_norm=self.max_norm,
            loss_scale=self._loss_scale() or 1.0,
            loss=loss,
            outliers=self.outliers,
            before_update=self.before_update,
        )
        if self.average is not None:
            self.average.update(self._update.skipped)
        return self._update

    def eval_batch(self, batch: StepBatch) -> tuple[Tensor, int]:
        """Summed loss over the trained tokens of the global batch (0-dim fp32, equal on every rank) and their number.

        The batch may hold another number of micro-batches than a training step.
        """
        count, (trained, _) = batch.tokens.shape[0], self._counts(batch)
        with torch.no_grad():
            return self._eval_sum(self._micro_batches(batch, weight=1.0), count), trained

    def _eval_sum(self, micro_batches: Iterator[tuple[Any, Any]], count: int) -> Tensor:
        """The loss of `count` micro-batches of each data rank, added up over all of them."""
        self.module.eval()
        total = torch.zeros((), device=self.state.device)
        for inputs, labels in micro_batches:
            total += self._forward(inputs, labels)
        self.module.train()
        return self._sum_over_data(total)

    def _sum_over_data(self, x: Tensor) -> Tensor:
        """Add up, in place, over the data ranks."""
        if (group := self.state.group("data")) is not None:
            dist.all_reduce(x, group=group)
        return x

    # -- a forward pass of this stage's layers ------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """See `Engine`. Afterwards the module is as it was."""
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad(), without_compile(self.module):
                yield
        finally:
            self.module.train(training)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """See `Engine`."""
        with switched_off(self.module):
            yield

    def stage_layers(self) -> Sequence[nn.Module]:
        """See `Engine`."""
        return list(self.module.sequential)

    def run_stage(self, carry: Carry, cache: KVCache | None, then: Then | None) -> Any:
        """See `Engine`."""
        self._await_weights()
        return run_stage(self.stage_layers(), carry, self.module.recompute, cache, then)

    # -- what a step counts -------------------------------------------------------------------------

    def _counts(self, batch: StepBatch, votes: Sequence[bool] = ()) -> list[int]:
        """Trained tokens and padding of the global batch, and how many ranks of the job vote for each of the votes.

        They are numbers of the host, and so the ranks add up there, while the device works on the step before.
        """
        counts = torch.tensor([batch.trained, batch.padding, *votes], dtype=torch.int64)
        if self.state.host is not None:
            if self.state.tp_rank or self.state.pp_rank:
                counts[:2] = 0  # the first rank of each copy of the model has counted this batch
            begun = time.monotonic()
            dist.all_reduce(counts, group=self.state.host)
            self.waited += time.monotonic() - begun
        return counts.tolist()

    def _micro_batches(self, batch: StepBatch, weight: float) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """The step as (inputs, labels) pairs on the device. labels = (targets, mask, weight), see objectives."""
        batch = batch.to(self.state.device, non_blocking=True)
        # A tensor from Python would wait for the device.
        scale = torch.full((), weight, dtype=torch.float32, device=self.state.device)
        documents = packed_documents(batch)
        for i in range(len(batch.tokens)):
            self.beat()
            inputs = (batch.tokens[i], batch.positions[i], *documents[i : i + 1])
            yield inputs, (batch.targets[i], batch.mask[i], scale)


def packed_documents(batch: StepBatch) -> list[Documents]:
    """The documents of each micro-batch that are kept apart; empty where none are."""
    if batch.doc_ids is None:
        return []
    if batch.bounds is None:
        return [Documents(ids) for ids in batch.doc_ids]
    return [Documents.with_bounds(*known) for known in zip(batch.doc_ids, batch.bounds, batch.longest, strict=True)]
