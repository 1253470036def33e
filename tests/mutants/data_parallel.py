"""Mistakes between data-parallel ranks, micro-batches and the shards of ZeRO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megatron.data import collate, loader
from megatron.data.batch import StepBatch
from megatron.data.collate import StepArrays
from megatron.optim.groups import parameter_groups
from megatron.training.engine import EvalOut
from megatron.training.engine_deepspeed import DeepSpeedEngine
from megatron.training.engine_gradients import PlainGradients
from megatron.training.engine_step import StepEngine
from megatron.training.engine_zero import ZeroGradients
from tests.mutants.registry import mutant
from tests.training.tiny import Layout

DP = Layout(dp=2)
ZERO2 = Layout(dp=2, zero=2)
ZERO3 = Layout(dp=2, zero=3)
ACCUMULATED = Layout(micro=1)  # on one rank: eight micro-batches a step


@mutant("neox", DP, "gradient of 0.word_embeddings.weight", engines="deepspeed")
def drop_data_reduction() -> Any:
    """Each data rank steps on the gradient of its own samples."""
    original = DeepSpeedEngine.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self.deepspeed.enable_backward_allreduce = False

    return mock.patch.object(DeepSpeedEngine, "__init__", init)


def _weighted(change: Any) -> Any:
    """Give micro-batches of training another weight: `change(engine, batch, weight)`."""
    original = StepEngine._micro_batches

    def micro_batches(self: StepEngine, batch: StepBatch, weights: Sequence[float]) -> Iterator[Any]:
        changed = [weight if weight == 1.0 else change(self, batch, weight) for weight in weights]
        return original(self, batch, changed)

    return mock.patch.object(StepEngine, "_micro_batches", micro_batches)


@mutant("neox", DP, "loss")
def mean_of_means() -> Any:
    """Each data rank divides by its own number of trained tokens."""
    return _weighted(lambda engine, batch, weight: engine.micro_batches / float(batch.mask.sum()))


@mutant("neox", DP, "loss")
def sum_over_data_ranks() -> Any:
    """The loss is scaled for gradients that are averaged, and they are: the factor dp is missing."""
    return _weighted(lambda engine, batch, weight: weight / engine.state.dp_size)


@mutant("neox", ACCUMULATED, "loss")
def accumulation_divided_twice() -> Any:
    """The loss is divided by the number of micro-batches by the loop and by the engine."""
    return _weighted(lambda engine, batch, weight: weight / engine.micro_batches)


@mutant("neox", ACCUMULATED, "loss")
def mean_of_each_micro_batch() -> Any:
    """Each micro-batch's loss is a mean over its own tokens, and the step's a mean of those (as in Transformers)."""
    original = StepEngine._micro_batches

    def micro_batches(self: StepEngine, batch: StepBatch, weights: Sequence[float]) -> Iterator[Any]:
        for inputs, (targets, mask, scale) in original(self, batch, weights):
            own = scale if weights == [1.0] else 1.0 / mask.sum().clamp(min=1.0).reshape(1)
            yield inputs, (targets, mask, own)

    return mock.patch.object(StepEngine, "_micro_batches", micro_batches)


@mutant("neox", DP, "loss")
def overlapping_samples() -> Any:
    """Ranks start one sample apart, not one micro-batch apart: they share samples, and others are never read."""

    def overlapping(consumed: int, *, micro_batch: int, gas: int, dp_rank: int, dp_size: int) -> np.ndarray:
        micro = np.arange(gas)[:, None] * (micro_batch * dp_size)
        return consumed + micro + dp_rank + np.arange(micro_batch)[None, :]

    return mock.patch.object(loader, "rank_samples", overlapping)


@mutant("neox", DP, "loss")
def same_samples_on_every_rank() -> Any:
    """Every data rank reads the first rank's samples."""
    original = loader.rank_samples
    return mock.patch.object(
        loader, "rank_samples", lambda consumed, **place: original(consumed, **{**place, "dp_rank": 0})
    )


@mutant("neox", DP, "loss")
def labels_shifted_after_cutting() -> Any:
    """Targets are the inputs shifted inside what was cut already: the last has none, and takes the first's."""
    original = collate.fill

    def fill(arrays: StepArrays, micro: int, row: int, *rest: Any) -> None:
        original(arrays, micro, row, *rest)
        arrays.targets[micro, row] = np.roll(arrays.tokens[micro, row], -1)

    return mock.patch.object(loader, "fill", fill)


@mutant("neox", DP, "evaluated loss", "steps")
def evaluation_of_own_samples() -> Any:
    """The loss of an evaluation is the sum over this rank's samples, by the number of all."""
    original = StepEngine._eval_sum

    def eval_sum(self: StepEngine, *arguments: Any) -> Tensor:
        with mock.patch.object(self, "_sum_over_data", lambda x: x):
            return original(self, *arguments)

    return mock.patch.object(StepEngine, "_eval_sum", eval_sum)


@mutant("neox", DP, "evaluated loss", "steps")
def evaluation_mean_over_ranks() -> Any:
    """The loss of an evaluation is a mean of the ranks' means."""
    original = StepEngine.eval_batch

    def eval_batch(self: StepEngine, batch: StepBatch) -> EvalOut:
        with mock.patch.object(self, "_sum_over_data", lambda x: x):
            out = original(self, batch)
        mean = out.sums / batch.mask.sum()
        dist.all_reduce(mean, group=self.state.group("data"))
        return replace(out, sums=mean / self.state.dp_size * out.trained_tokens)

    return mock.patch.object(StepEngine, "eval_batch", eval_batch)


@mutant("neox", ZERO2, "gradient norm", engines="deepspeed")
def norm_of_own_shard() -> Any:
    """Each data rank clips by the norm of its own shard."""
    return mock.patch.object(ZeroGradients, "partitioned", False)


@mutant("neox", ZERO3, "gradient norm")
def norm_of_own_shard_of_zero_3() -> Any:
    """Each data rank clips by the norm of its own shard, weights sharded too."""
    return mock.patch.object(ZeroGradients, "partitioned", False)


@mutant("neox", DP, "gradient norm", engines="deepspeed")
def norm_added_up_over_replicas() -> Any:
    """Gradients that all data ranks hold whole count once per rank in the norm."""
    return mock.patch.object(PlainGradients, "partitioned", True)


@mutant("neox", ZERO2, "update of 0.word_embeddings.weight")
def decay_of_the_other_group() -> Any:
    """Weights and vectors take each other's weight decay, as when groups are flattened in another order."""

    def swapped(*arguments: Any, **named: Any) -> list[dict[str, Any]]:
        groups = parameter_groups(*arguments, **named)
        decays = [group["weight_decay"] for group in groups]
        return [{**group, "weight_decay": decay} for group, decay in zip(groups, reversed(decays), strict=True)]

    return mock.patch("megatron.training.setup.parameter_groups", swapped)


@mutant("mup", ZERO2, "update of 2.attention.query_key_value.weight")
def lose_the_rate_of_matrices() -> Any:
    """Each group's factor of the learning rate (muP) is lost when the schedule sets the rate."""

    def groups(*arguments: Any, **named: Any) -> list[dict[str, Any]]:
        return [{**group, "lr_mult": 1.0} for group in parameter_groups(*arguments, **named)]

    return mock.patch("megatron.training.setup.parameter_groups", groups)


@mutant("neox", ACCUMULATED, "gradient of 0.word_embeddings.weight", engines="deepspeed")
def keep_the_last_micro_batch() -> Any:
    """The gradient is what the last micro-batch says, not the sum."""
    original = StepEngine._micro_batches

    def micro_batches(self: StepEngine, batch: StepBatch, weights: Sequence[float]) -> Iterator[Any]:
        for found in original(self, batch, weights):
            self.module.zero_grad()
            yield found

    return mock.patch.object(StepEngine, "_micro_batches", micro_batches)
