"""The memory estimate against what engines hold: bytes of all tensors' storages, at the moments that need most."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.plan.memory import estimate
from megatron.plan.stages import stage_sizes
from tests.distributed import run_distributed
from tests.training.test_precision import fp16_allowed, fp16_keys
from tests.training.tiny import NEOX, VOCAB, Layout, build, step_batch, tiny_args

pytestmark = pytest.mark.cpu

KEYS = {**NEOX, "hidden_size": 256}
BUCKET = 100_000


def live_bytes() -> int:
    """Of all storages that a tensor of this process refers to, garbage apart."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def held(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> tuple[int, float]:
    """(most bytes that a step has, the estimate without activations)."""
    given = layout.keys() | {"zero_optimization": {"stage": layout.zero, "reduce_bucket_size": BUCKET}}
    before, found = live_bytes(), [0]
    with mock.patch.object(Layout, "keys", lambda self: given), fp16_allowed():
        engine, args, lr = build(rank, keys, layout)

    def look(*_: Any) -> None:
        found.append(live_bytes() - before)

    engine.train_batch(step_batch(0, args, engine.state), lr(0))
    engine.before_update = look
    inner = engine.deepspeed.optimizer
    getattr(inner, "optimizer", inner).register_step_pre_hook(look)
    first = next(p for p in engine.params().values() if p.requires_grad)  # its gradient is the last one
    with torch.no_grad():
        first.register_post_accumulate_grad_hook(look)
    engine.train_batch(step_batch(1, args, engine.state), lr(1))
    _, stages = stage_sizes(args, VOCAB)
    plan = estimate(args, held=stages[0], stage=0, blocks=range(2), padded_vocab_size=args.tokenizer.padded_vocab_size)
    return max(found), plan.weights + plan.gradients + plan.optimizer


FP32, BF16, FP16 = {"precision": "fp32"}, {"precision": "bfloat16"}, fp16_keys()
# One moment of matrices, two of the rest, which is most in this model.
MUON = {"optimizer": {"type": "muon", "params": {"lr": 1e-3}}, "value_embedding_interval": 1}
CASES: list[Any] = [
    *((FP32, Layout(dp=2, zero=stage)) for stage in (1, 2, 3)),
    *((BF16, Layout(dp=2, zero=stage)) for stage in (1, 2)),
    (BF16 | MUON, Layout()),
    (FP16, Layout(dp=2, zero=1)),
    (BF16 | {"lora_r": 32, "use_dora": True}, Layout(dp=2, zero=1)),
]
MORE = [
    (BF16, Layout()),
    (FP32, Layout()),
    (FP32, Layout(dp=2)),
    (FP32, Layout(dp=2, tp=2, zero=2)),
    (BF16, Layout(zero=2)),
    (BF16, Layout(dp=2, zero=3)),
    (BF16, Layout(dp=2, tp=2, zero=1)),
    *((FP16, Layout(zero=stage)) for stage in (1, 2)),
    *((FP16, Layout(dp=2, zero=stage)) for stage in (2, 3)),
    *((keys, Layout(dp=4, zero=stage)) for keys in (FP32, BF16, FP16) for stage in (1, 2, 3)),
]
CASES += [pytest.param(*case, marks=pytest.mark.full) for case in MORE]


TOLD: list[tuple[dict[str, Any], int]] = [
    ({"train_impl": "distill", "distill_teacher": "x", "distill_top_k": 0}, VOCAB),
    ({"train_impl": "distill", "distill_teacher": "x", "distill_top_k": 10}, 20),
    ({"train_impl": "grpo", "rollout_prompts": ["x"], "reward": "exact", "kl_impl": "full"}, VOCAB),
]


@pytest.mark.parametrize(("keys", "each"), TOLD, ids=("vocabulary", "likeliest", "divergence"))
def test_what_another_model_says_of_a_step_is_counted(keys: dict[str, Any], each: int) -> None:
    """On the last stage, of all four micro-batches: once beside the step, twice before it."""
    keys = {**KEYS, "train_batch_size": 8, "rollouts_per_prompt": 4, "rollout_tokens": 8, **keys}
    found = []
    for more in ({}, {"train_impl": "normal", "rollout_prompts": None, "reward": None}):
        args = tiny_args({**keys, **more}, Layout(pp=2, micro=2))
        _, stages = stage_sizes(args, VOCAB)
        plans = [estimate(args, held=one, stage=i, blocks=[i], padded_vocab_size=VOCAB) for i, one in enumerate(stages)]
        found.append([plan.activations for plan in plans])
    told = 4 * 8 * args.model.seq_length * each
    (first, last), (_, alone) = found
    assert first == found[1][0] and last == pytest.approx(max(alone, told) + told)


@pytest.mark.parametrize(
    ("keys", "layout"), CASES, ids=lambda x: getattr(x, "name", x.get("precision") if isinstance(x, dict) else x)
)
def test_the_estimate_is_what_engines_hold(keys: dict[str, Any], layout: Layout) -> None:
    for bytes_held, planned in run_distributed(held, layout.world, {**KEYS, **keys}, layout, timeout=110):
        assert planned == pytest.approx(bytes_held, rel=0.1)
