"""A step of the native engine: the model is a plain module, backward passes are torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.model.sequential import SequentialModel
from megatron.mpu.sharding import named_parameters, spec_of
from megatron.mpu.state import ParallelState
from megatron.objectives import measured
from megatron.optim.matrices import hold
from megatron.optim.optimizers import Groups
from megatron.training.engine_step import StepEngine
from megatron.training.native.buckets import Bucket, cut_into_buckets
from megatron.training.native.fixed_point import SUM_UNITS, FixedPointSums
from megatron.training.native.gradients import NativeGradients
from megatron.training.native.state import NativeState
from megatron.training.partition_comm import Arrivals

DTYPES = {"fp32": torch.float32, "bfloat16": torch.bfloat16}


class NativeEngine(StepEngine):
    """Trains a `SequentialModel`.

    Args:
        model: its parameters become views of this engine's memory.
        groups: of the parameters that are trained, as `optim.groups.parameter_groups` makes them.
        build: makes the optimizer of such groups; it is given this rank's parts of the masters in place of parameters.
        state: this rank's place in the layout.
        precision: "fp32" or "bfloat16".
        max_norm: clip the global gradient norm to this; 0 = off.
        micro_batches: of a step.
        bucket_elements: see `cut_into_buckets`.
        fixed_point: gradients, their norm and losses are added up in fixed point, so that their bits do not depend on
            the layout; micro-batches must be of one sample.
    """

    _gradients: NativeGradients

    def __init__(
        self,
        model: SequentialModel,
        groups: Groups,
        build: Callable[[Groups], torch.optim.Optimizer],
        state: ParallelState,
        *,
        precision: str,
        max_norm: float,
        micro_batches: int,
        bucket_elements: int | None = None,
        fixed_point: bool = False,
    ) -> None:
        super().__init__(state, precision=precision, max_norm=max_norm, micro_batches=micro_batches)
        self.module = model
        self._params = dict(named_parameters(model))
        dtype = DTYPES[precision]
        trained = {id(p) for group in groups for p in group["params"]}
        for p in model.parameters():
            if id(p) not in trained and not spec_of(p).keep_fp32:
                p.data = p.data.to(dtype)
        ours = [p for p in model.parameters() if id(p) in trained]
        self.buckets = cut_into_buckets(ours, state, dtype, bucket_elements, fixed_point)
        self.optimizer = build(masters_of(groups, self.buckets))
        self.fixed_point = FixedPointSums(self._no_sums()) if fixed_point else None
        self._gradients = NativeGradients(self.buckets, self.optimizer, micro_batches, self.fixed_point)
        self._optimizer_state = NativeState(self.buckets, self.optimizer)
        arrivals = Arrivals(model.sequential, self.buckets)
        model.before_layer, self._await_weights = arrivals.wait_before, arrivals.wait_for_all

    def _forward_backward(self, micro_batches: Iterator[tuple[Any, Any]]) -> Tensor:
        self.module.train()
        if self.fixed_point is not None:
            self.fixed_point.terms = self.micro_batches * self.state.dp_size
        total = self._no_sums()
        # A mean over micro-batches and data ranks, as objectives expect.
        share = torch.full((), 1 / (self.micro_batches * self.state.dp_size), device=self.state.device)
        for inputs, labels in micro_batches:
            loss, metrics = self.module(inputs, labels)
            loss.backward(share.to(loss.dtype))
            self._gradients.end_pass()
            if self.fixed_point is not None:
                self.fixed_point.add_means(measured(loss, metrics) * share)
            else:
                total += measured(loss, metrics)
        # Behind the update they would wait for the weights on their way.
        sums = self.fixed_point
        means = self._sum_over_data(total * share) if sums is None else sums.means(self._sum_over_data)
        self._take_update(means[0])
        return means

    def _forward(self, inputs: Any, labels: Any) -> tuple[Tensor, Tensor]:
        return self.module(inputs, labels)

    def _eval_sum(self, micro_batches: Iterator[tuple[Any, Any]], count: int) -> Tensor:
        if self.fixed_point is None:
            return super()._eval_sum(micro_batches, count)
        sums = FixedPointSums(self._no_sums(), SUM_UNITS)
        sums.terms = count * self.state.dp_size
        self.module.eval()
        for inputs, labels in micro_batches:
            sums.add_means(measured(*self._forward(inputs, labels)))
        self.module.train()
        return sums.means(self._sum_over_data)

    def _set_micro_batches(self) -> None:
        self._gradients.set_passes(self.micro_batches)


def masters_of(groups: Groups, buckets: list[Bucket]) -> Groups:
    """The groups with what this rank owns of the masters in place of the parameters; those that it owns nothing of are
    left out."""
    slots = {id(slot.parameter): slot for bucket in buckets for slot in bucket.slots}
    for bucket in buckets:
        for slot in bucket.slots:
            hold(slot.master, [bucket.held(slot)])
    found = [
        {**group, "params": [slot.master for p in group["params"] if (slot := slots[id(p)]).owned]} for group in groups
    ]
    kept = [group for group in found if group["params"]]
    for kind in {bool(group.get("matrices")) for group in groups} - {bool(group.get("matrices")) for group in kept}:
        # An optimizer wants one tensor at least; an empty one with a gradient has the kinds of state of other ranks.
        empty = buckets[0].masters[:0]
        empty.grad = torch.zeros_like(empty)
        hold(empty, [])
        kept.append({**next(group for group in groups if bool(group.get("matrices")) == kind), "params": [empty]})
    return kept
