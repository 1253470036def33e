"""A derived config in a few lines of arithmetic, for the start of a run and for the dry run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.formulas import ParameterCount, flops_per_token, parameter_count
from megatron.neox_arguments.rules_schedule import LENGTHS

if TYPE_CHECKING:
    from megatron.neox_arguments.arguments import NeoXArgs


def describe(args: NeoXArgs, vocab_size: int | None = None) -> list[str]:
    """Ranks, batch, length, schedule and size of a derived config, one line each.

    `vocab_size` (real) adds the parameter count and the FLOPs of a step; without it they are left out.
    """
    lines = [_ranks(args), _batch(args), *_length(args), _optimizer(args)]
    return lines + (_size(args, vocab_size) if vocab_size is not None else [])


def _ranks(args: NeoXArgs) -> str:
    parallel = args.parallel
    pipe = max(parallel.pipe_parallel_size, 1)
    return (
        f"ranks: {parallel.world_size} = pipeline {pipe} x data {parallel.data_parallel_size}"
        f" x tensor {parallel.model_parallel_size}{' with sequence parallel' if parallel.sequence_parallel else ''}"
    )


def _batch(args: NeoXArgs) -> str:
    training = args.training
    plan = BatchPlan.of(args)
    return (
        f"batch: {training.train_batch_size:,} samples = micro {training.train_micro_batch_size_per_gpu} x accumulation"
        f" {training.gradient_accumulation_steps} x data {args.parallel.data_parallel_size};"
        f" x {plan.tokens_per_sample:,} = {training.train_batch_size * plan.tokens_per_sample:,} tokens per step"
        f"{plan.describe()}"
    )


def _length(args: NeoXArgs) -> list[str]:
    training = args.training
    if training.train_iters is None:
        given = ((name, getattr(training, name)) for name in LENGTHS[1:])
        return [f"length: {value} {name.removeprefix('train_')}" for name, value in given if value is not None]
    plan = BatchPlan.of(args)
    samples = plan.samples(training.train_iters)
    return [
        f"length: {training.train_iters:,} steps = {samples:,} samples = {samples * plan.tokens_per_sample:,} tokens",
        *(f"unlearning: {line}" for line in plan.describe_forgetting(training.train_iters)),
    ]


def _optimizer(args: NeoXArgs) -> str:
    optimizer, schedule = args.optimizer, args.schedule
    steps = schedule.steps
    decay = f"{schedule.lr_decay_style} over {steps:,} steps" if steps else schedule.lr_decay_style
    warm = f", warm-up {schedule.warmup_share * steps:,.0f} steps" if steps else ""
    clip = f"clip {optimizer.gradient_clipping:g}" if optimizer.gradient_clipping else "no clipping"
    return (
        f"optimizer: {optimizer.optimizer_type}, lr {optimizer.lr:g} to {schedule.min_lr:g} {decay}{warm}, weight decay"
        f" {optimizer.weight_decay:g}, {clip}, {optimizer.precision}, ZeRO {optimizer.zero_stage}"
    )


def _layers(count: ParameterCount) -> str:
    """Blocks by size: `24 layers x 12,596,224`."""
    sizes = Counter(block.total for block in count.blocks)
    return " + ".join(f"{times} layers x {size:,}" for size, times in sizes.items())


def _size(args: NeoXArgs, vocab_size: int) -> list[str]:
    count = parameter_count(args.model, vocab_size)
    tokens = args.training.train_batch_size * BatchPlan.of(args).tokens_per_sample
    flops = flops_per_token(args.model, vocab_size) * tokens
    active = f", of which a token uses {count.active:,}" if count.active != count.total else ""
    return [
        f"parameters: {count.total:,} = embedding {count.embedding:,} + {_layers(count)} + final norm"
        f" {count.final_norm:,} + head {count.head:,}{active}",
        f"work: {flops / 1e12:,.3g} TFLOP per step",
    ]
