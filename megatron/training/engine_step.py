"""One optimizer step of one data-parallel rank's batch: what every engine does around its forward and backward passes.

Shapes: `g` micro-batches of a step (gradient accumulation), `b` micro-batch, `s` sequence.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

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
from megatron.objectives import Objective, measured
from megatron.training.compile import without_compile
from megatron.training.engine import EvalOut, StepOut
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
        """All passes of a step and the update (`_take_update`). Returns the means of loss and metrics of the
        micro-batches of all data ranks, `[1 + m]` fp32, on every rank."""

    @abstractmethod
    def _forward(self, inputs: Any, labels: Any) -> tuple[Tensor, Tensor]:
        """Loss and metrics of one micro-batch, where the model is one stage."""

    @abstractmethod
    def _set_micro_batches(self) -> None:
        """Steps have `self.micro_batches` from here on."""

    def train_batch(self, batch: StepBatch, lr: float) -> StepOut:
        """Forward, backward and update over a whole step. The same call on every rank.

        Args:
            batch: this data rank's share of the global batch.
            lr: learning rate of this step.
        """
        trained, padding, counts, votes = self._counts(batch, self.votes())
        if not any(counts):
            # Decided before any forward: a mean over nothing would be NaN.
            nothing = torch.zeros((), device=self.state.device)
            return StepOut(nothing, None, nothing == 0, trained, self._loss_scale(), padding, votes)
        self._optimizer_state.set_lr(lr)
        if len(batch.tokens) != self.micro_batches:
            self.micro_batches = len(batch.tokens)
            self._set_micro_batches()
        terms = self.micro_batches * self.state.dp_size
        weights = [terms / count if count else 0.0 for count in counts]
        if self._optimizer_state.wants_curvature(batch.step):
            drawn = replace(batch, targets=draws(batch.tokens, batch.step))
            with self._optimizer_state.estimating_curvature(trained):
                self._forward_backward(self._micro_batches(drawn, weights))
        self._update = None
        loss, *metrics = self._forward_backward(self._micro_batches(batch, weights)).unbind()
        update = self._update
        assert update is not None, "a step ended without an update"
        not_finite = update.skipped if update.outlier is None else update.skipped & ~update.outlier
        self.skipped_steps = self.skipped_steps + not_finite
        scale = self._loss_scale()
        over = zip(self.objective.metrics, metrics, self.objective.divisors(counts)[1:], strict=True)
        known = {name: metric for name, metric, count in over if count}
        return StepOut(loss, update.norm, update.skipped, trained, scale, padding, votes, update.outlier, known)

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

    @property
    def objective(self) -> Objective:
        """See `Engine`."""
        return self.module.objective

    def eval_batch(self, batch: StepBatch) -> EvalOut:
        """The loss of a batch, without a step.

        The batch may hold another number of micro-batches than a training step.
        """
        trained, _, counts, _ = self._counts(batch)
        with torch.no_grad():
            sums = self._eval_sum(self._micro_batches(batch, [1.0] * len(counts)), batch.tokens.shape[0])
        return EvalOut(sums, self.objective.divisors(counts), trained)

    def _no_sums(self) -> Tensor:
        """Of loss and metrics, `[1 + m]`."""
        return torch.zeros(1 + len(self.objective.metrics), device=self.state.device)

    def _eval_sum(self, micro_batches: Iterator[tuple[Any, Any]], count: int) -> Tensor:
        """Loss and metrics of `count` micro-batches of each data rank, added up over all of them: `[1 + m]`."""
        self.module.eval()
        total = self._no_sums()
        for inputs, labels in micro_batches:
            total += measured(*self._forward(inputs, labels))
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

    def _counts(self, batch: StepBatch, votes: Sequence[bool] = ()) -> Counts:
        """They are numbers of the host, and so the ranks add up there, while the device works on the step before."""
        mine = [batch.trained, batch.padding, *self.objective.counted(batch)]
        sums = torch.tensor([*mine, *votes], dtype=torch.float64)
        if self.state.host is not None:
            if self.state.tp_rank or self.state.pp_rank:
                sums[: len(mine)] = 0  # the first rank of each copy of the model has counted this batch
            begun = time.monotonic()
            dist.all_reduce(sums, group=self.state.host)
            self.waited += time.monotonic() - begun
        trained, padding, *others = sums.tolist()
        counted = len(mine) - 2
        return Counts(int(trained), int(padding), others[:counted], tuple(votes > 0 for votes in others[counted:]))

    def _micro_batches(self, batch: StepBatch, weights: Sequence[float]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """The step as (inputs, labels) pairs on the device; see `objectives.Labels`."""
        batch = batch.to(self.state.device, non_blocking=True)
        # A tensor from Python would wait for the device.
        ours = [torch.full((1,), weight, dtype=torch.float32, device=self.state.device) for weight in weights]
        known = ours[0] if len(ours) == 1 else torch.cat(ours)
        documents = packed_documents(batch)
        for i in range(len(batch.tokens)):
            self.beat()
            inputs = (batch.tokens[i], batch.positions[i], *documents[i : i + 1])
            yield inputs, self.objective.labels(batch, i, known)


class Counts(NamedTuple):
    """Of the global batch: trained tokens, padding, what the objective counts; and which votes any rank of the job
    has voted for."""

    trained: int
    padding: int
    counted: Sequence[float]
    votes: tuple[bool, ...]


def packed_documents(batch: StepBatch) -> list[Documents]:
    """The documents of each micro-batch that are kept apart; empty where none are."""
    if batch.doc_ids is None:
        return []
    if batch.bounds is None:
        return [Documents(ids) for ids in batch.doc_ids]
    return [Documents.with_bounds(*known) for known in zip(batch.doc_ids, batch.bounds, batch.longest, strict=True)]
