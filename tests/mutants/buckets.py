"""Mistakes in the buckets in which data-parallel ranks exchange gradients and weights, and in what the native engine
keeps of them."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megatron.mpu.owned import sum_owned
from megatron.training import partition_comm
from megatron.training.native.buckets import Bucket, Slot
from megatron.training.native.engine import NativeEngine
from megatron.training.native.gradients import NativeGradients
from megatron.training.native.state import NativeState
from megatron.training.partition_comm import GradientSums, own_part, start_all_gather, start_reduce_scatter
from tests.mutants.registry import mutant
from tests.training.tiny import Layout

DP = Layout(dp=2)
HALF = Layout(dp=2, micro=1, zero=1)  # both engines, in bf16
EP = Layout(dp=4, ep=2, micro=1)
EXPERT = "gradient of 3.mlp.experts.linear1"


def _communicated(name: str, mutated: Any) -> Any:
    """`mutated` in place of a function of partition_comm, in both engines."""
    stack = contextlib.ExitStack()
    for place in ("engine_bf16", "native.buckets"):
        stack.enter_context(mock.patch(f"megatron.training.{place}.{name}", mutated))
    return stack


# -- gradients ---------------------------------------------------------------------------------------------------------


@mutant("llama-bf16", HALF, "gradient of 2.mlp.linear1.weight")
def drop_bucket_reduction() -> Any:
    """Each rank takes its part of its own sums for that of all."""
    return _communicated("start_reduce_scatter", lambda flat, group: mock.Mock())


@mutant("llama-bf16", HALF, "gradient of *")
def reduce_bucket_twice() -> Any:
    """A bucket is added up once its last gradient has come, and again with all that are left."""

    def twice(flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
        start_reduce_scatter(flat, group).wait()
        return start_reduce_scatter(flat, group)

    return _communicated("start_reduce_scatter", twice)


@mutant("llama-bf16", HALF, "gradient of 2.mlp.linear1.weight")
def keep_the_last_micro_batch_of_a_bucket() -> Any:
    """Every gradient is taken for the first of its step: the sum is what the last micro-batch says."""

    def written(total: Tensor, gradient: Tensor, first: bool) -> None:
        total.copy_(gradient.reshape(total.shape))

    return mock.patch.object(partition_comm, "accumulate", written)


@mutant("llama-bf16", HALF, "gradient of 2.mlp.linear1.weight", "steps")
def sums_not_cleared() -> Any:
    """Gradients of a step are added to those of the step before."""
    original = GradientSums.clear

    def clear(self: GradientSums) -> None:
        begun = [flag.copy() for _, flag in flags(self)]
        original(self)
        for (_, flag), was in zip(flags(self), begun, strict=True):
            flag[()] = was

    def flags(sums: GradientSums) -> list[Any]:
        return [row for rows in sums._sums for row in rows]

    return mock.patch.object(GradientSums, "clear", clear)


@mutant("llama-bf16", HALF, "gradient norm")
def norm_of_own_buckets() -> Any:
    """Each data rank clips by the norm of the parts of the buckets that it owns."""
    return mock.patch("megatron.training.engine_update.sum_owned", lambda x, state, *partitioned: sum_owned(x, state))


@mutant("neox", DP, "gradient of *", engines="native")
def gradient_beside_its_master() -> Any:
    """Where a parameter lies across the border of two ranks' parts, the second one's gradient begins an element late,
    as when its part began with padding."""
    original = Bucket._slot

    def slot(self: Bucket, p: Parameter, start: int, own: range) -> Slot:
        found = original(self, p, start, own)
        if found.total is not None and found.owned and found.owned.start:
            whole = found.total.view(-1)
            found.gradient = whole[found.owned.start - 1 : found.owned.stop - 1].view(found.master.shape)
        return found

    return mock.patch.object(Bucket, "_slot", slot)


@mutant("neox-tied", DP, "gradient of 0.word_embeddings.weight", engines="native")
def tied_weight_not_tied() -> Any:
    """The head keeps a copy of the embedding's weight when the buckets take it over."""
    original = NativeEngine.__init__

    def init(self: NativeEngine, model: Any, *arguments: Any, **named: Any) -> None:
        original(self, model, *arguments, **named)
        weight = model.sequential[0].word_embeddings.weight
        copy = nn.Parameter(weight.detach().clone())
        copy.spec = weight.spec  # type: ignore[attr-defined]
        model.sequential[-1].word_embeddings.weight = copy

    return mock.patch.object(NativeEngine, "__init__", init)


@mutant("moe", EP, EXPERT, engines="native")
def buckets_of_experts_divided_by_their_ranks() -> Any:
    """The mean over the ranks that hold an expert, as if its gradient came from one rank's tokens."""
    original = Bucket.start_reduction

    def reduced(self: Bucket) -> None:
        if self.sums is not None and self.group is not None and self.ranks == 2:  # of four data ranks
            self.sums.mul_(2.0)
        original(self)

    return mock.patch.object(Bucket, "start_reduction", reduced)


# -- weights -----------------------------------------------------------------------------------------------------------


@mutant("llama-bf16", HALF, "loss", "steps")
def weights_not_gathered() -> Any:
    """Each rank goes on with the parts of the weights that it owns, and others' of the step before."""
    return _communicated("start_all_gather", lambda flat, group: mock.Mock())


@mutant("llama-bf16", HALF, "loss", "steps")
def weights_gathered_in_reverse() -> Any:
    """The parts of a bucket are put together in the wrong order."""

    def reverse(flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
        start_all_gather(flat, group).wait()
        flat.copy_(flat.view(dist.get_world_size(group), -1).flip(0).reshape(-1))
        return mock.Mock()

    return _communicated("start_all_gather", reverse)


@mutant("llama-bf16", HALF, "loss", "steps")
def weights_gathered_too_early() -> Any:
    """The weights are sent before the masters' new values are in them."""
    originals = [(cls, cls.start_publishing) for cls in _buckets()]

    def early(original: Any) -> Any:
        def publish(self: Any) -> None:
            start_all_gather(self.weights, self.group).wait()
            before = self.weights.clone()
            original(self)
            self.wait()
            own = own_part(self.weights, self.group).clone()
            self.weights.copy_(before)
            own_part(self.weights, self.group).copy_(own)

        return publish

    stack = contextlib.ExitStack()
    for cls, original in originals:
        stack.enter_context(mock.patch.object(cls, "start_publishing", early(original)))
    return stack


def _buckets() -> list[Any]:
    from megatron.training.engine_bf16 import FlatGroup

    return [Bucket, FlatGroup]


@mutant("llama-bf16", HALF, "loss", "steps", engines="native")
def masters_not_published() -> Any:
    """The step moves the masters, and the model goes on with the weights of the step before."""
    return mock.patch.object(Bucket, "start_publishing", lambda self: None)


@mutant("neox", DP, "update of *", engines="native")
def last_bucket_not_stepped() -> Any:
    """The bucket that is complete last is forgotten: its masters have no gradient in the step."""
    original = NativeGradients.step

    def step(self: NativeGradients, *arguments: Any) -> None:
        for slot in self.buckets[-1].slots:
            if slot.gradient is not None:
                slot.gradient.zero_()
        original(self, *arguments)

    return mock.patch.object(NativeGradients, "step", step)


@mutant("neox", DP, "weight of *", "resumed", engines="native")
def loaded_masters_not_published() -> Any:
    """A rank reads what it owns, and the others do not hear of it."""
    return mock.patch.object(NativeState, "publish", lambda self, replicated: None)


@mutant("neox", DP, "update of *", "resumed", engines="native")
def moments_of_the_slot_before() -> Any:
    """Moments are written to those of the parameter before, where it has as many elements."""
    original = NativeState._pieces

    def pieces(self: NativeState, p: Parameter, share: range) -> dict[str, Tensor]:
        found = original(self, p, share)
        slots = [slot for bucket in self.buckets for slot in bucket.slots if slot.owned]
        place = next((i for i, slot in enumerate(slots) if slot.parameter is p), 0)
        before = slots[place - 1]
        if len(before.owned) != len(share) or before.parameter.numel() != p.numel():
            return found
        return {**original(self, before.parameter, before.owned), "weight": found["weight"]}

    return mock.patch.object(NativeState, "_pieces", pieces)
