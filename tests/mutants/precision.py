"""Mistakes in half precision, in steps that are scaled or skipped, and in what is counted before them."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.data.batch import StepBatch
from megatron.mpu.state import ParallelState
from megatron.optim.scaled_step import scaled_step
from megatron.training import engine_update
from megatron.training.engine_config import deepspeed_config
from megatron.training.engine_step import Counts, StepEngine
from tests.mutants.registry import mutant
from tests.training.tiny import Layout

HALF = Layout(dp=2, micro=1, zero=1)


@mutant("llama-bf16", HALF, "gradient of 2.mlp.linear1.weight", engines="deepspeed")
def reduce_in_bf16() -> Any:
    """The fp32 sums of data ranks are added up in bf16 (DeepSpeed's default)."""
    return mock.patch(
        "megatron.training.setup_deepspeed.deepspeed_config",
        lambda args: {**deepspeed_config(args), "communication_data_type": "bf16"},
    )


@mutant("llama-bf16", HALF, "gradient of 2.mlp.linear1.weight")
def accumulate_in_bf16() -> Any:
    """Gradients of micro-batches are added up in bf16."""

    def accumulate(total: Tensor, gradient: Tensor, first: bool) -> None:
        total.copy_((total * (not first) + gradient.reshape(total.shape)).bfloat16())

    return mock.patch("megatron.training.partition_comm.accumulate", accumulate)


@mutant("llama-fp16", Layout(micro=1, zero=1), "gradient norm", engines="deepspeed")
def scale_counted_twice() -> Any:
    """The norm is divided by the loss scale twice: a clip that is never active."""
    original = engine_update.clip_and_step

    def twice(*arguments: Any, loss_scale: float = 1.0, **named: Any) -> Any:
        return original(*arguments, loss_scale=loss_scale**2, **named)

    return mock.patch("megatron.training.engine_step.clip_and_step", twice)


@mutant("neox", Layout(tp=2), "update of 2.mlp.linear1.weight", "overflow")
def skip_per_rank() -> Any:
    """Each rank looks at its own gradients before it steps: one leaves its shard alone, the others go on."""
    from megatron.mpu.owned import sum_owned

    def own(x: Tensor, state: ParallelState, *partitioned: bool) -> Tensor:
        return sum_owned(torch.nan_to_num(x, posinf=0.0), state, *partitioned) + torch.where(x.isfinite(), 0.0, x)

    return mock.patch("megatron.training.engine_update.sum_owned", own)


# -- the scaled step, and what is counted before it --------------------------------------------------------------------


def _scaled(change: Any) -> Any:
    """`change(optimizer, scale, found_inf)` in place of `scaled_step`, wherever it is called."""
    stack = contextlib.ExitStack()
    for place in ("engine_gradients", "engine_bf16", "native.gradients"):
        stack.enter_context(mock.patch(f"megatron.training.{place}.scaled_step", change))
    return stack


@mutant("neox", Layout(dp=2), "gradient of 2.mlp.linear1.weight")
def clip_applied_twice() -> Any:
    """The kernel scales gradients that were clipped already."""
    return _scaled(lambda optimizer, scale, found_inf: scaled_step(optimizer, scale * scale, found_inf))


@mutant("neox", Layout(dp=2), "gradient of 2.mlp.linear1.weight")
def clip_inverted() -> Any:
    """The kernel divides by the scale, and is given the factor."""
    return _scaled(lambda optimizer, scale, found_inf: scaled_step(optimizer, 1 / scale, found_inf))


@mutant("neox", Layout(dp=2), "gradient of 2.mlp.linear1.weight")
def clip_forgotten() -> Any:
    """The norm is worked out, and the step is taken with the gradients as they are."""
    return _scaled(lambda optimizer, scale, found_inf: scaled_step(optimizer, None, found_inf))


@mutant("neox", Layout(tp=2), "update of *", "overflow")
def skip_ignored() -> Any:
    """The step is taken though a gradient is not finite."""
    return _scaled(lambda optimizer, scale, found_inf: scaled_step(optimizer, scale, torch.zeros_like(found_inf)))


@mutant("neox", Layout(tp=2), "update of *", "overflow")
def moments_fade_on_a_skip() -> Any:
    """A skipped step is one with gradients of zero: weights stay, moments fade."""

    def faded(optimizer: Any, scale: Tensor | None, found_inf: Tensor) -> None:
        scaled_step(optimizer, scale, found_inf)
        for state in optimizer.state.values():
            state["exp_avg"].mul_(1 - 0.1 * float(found_inf))

    return _scaled(faded)


@mutant("neox", Layout(tp=2), "update of *", "overflow")
def skipped_step_counted() -> Any:
    """Adam's bias correction counts steps that were skipped."""

    def counted(optimizer: Any, scale: Tensor | None, found_inf: Tensor) -> None:
        scaled_step(optimizer, scale, found_inf)
        for state in optimizer.state.values():
            state["step"] += float(found_inf)

    return _scaled(counted)


def _counted(change: Any) -> Any:
    """`change(count)` in place of `StepEngine._counts`; `count(votes)` counts as it should."""
    original = StepEngine._counts

    def counts(self: StepEngine, batch: StepBatch, votes: Any = ()) -> Counts:
        return change(self, lambda votes=votes: original(self, batch, votes), votes)

    return mock.patch.object(StepEngine, "_counts", counts)


@mutant("neox", Layout(dp=2), "number of trained tokens", "steps")
def counts_of_the_step_before() -> Any:
    """A step is divided by the number of tokens of the step before, which was on its way for too long."""
    kept: dict[int, Counts] = {}

    def late(engine: StepEngine, count: Any, votes: Any) -> Counts:
        before, kept[id(engine)] = kept.get(id(engine)), count()
        return before._replace(votes=kept[id(engine)].votes) if before else kept[id(engine)]

    return _counted(late)


@mutant("neox", Layout(dp=2), "number of trained tokens")
def counts_of_own_samples() -> Any:
    """Each data rank divides by the number of its own tokens."""

    def own(engine: StepEngine, count: Any, votes: Any) -> Counts:
        with mock.patch("megatron.training.engine_step.dist.all_reduce"):
            return count()

    return _counted(own)


@mutant("neox", Layout(tp=2), "number of trained tokens")
def counts_of_every_tensor_parallel_rank() -> Any:
    """All ranks of a copy of the model count its batch."""

    def every(engine: StepEngine, count: Any, votes: Any) -> Counts:
        found, ranks = count(), engine.state.tp_size
        counted = [number * ranks for number in found.counted]
        return found._replace(trained=found.trained * ranks, padding=found.padding * ranks, counted=counted)

    return _counted(every)


@mutant("neox", Layout(dp=2), "votes")
def votes_of_own_rank() -> Any:
    """A rank that wants to stop is not heard by the others."""
    return _counted(lambda engine, count, votes: count(())._replace(votes=tuple(votes)))
