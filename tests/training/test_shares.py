"""Which elements a data rank answers for, at every ZeRO stage: they cover each parameter once, hold what DeepSpeed's
own getters put together, and what is written in shares is what every rank has afterwards."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from megatron.mpu.owned import own_experts
from megatron.mpu.random import stable_seed
from tests.distributed import run_distributed
from tests.training.test_expert_parallel import MODELS
from tests.training.tiny import LLAMA, Layout, build, step_batch, whole_state

pytestmark = pytest.mark.cpu

MOMENTS = ("exp_avg", "exp_avg_sq")
BF16 = {"precision": "bfloat16"}
CASES: dict[str, tuple[dict[str, Any], Layout]] = {
    "fp32, zero 0": (LLAMA, Layout(dp=2)),
    "fp32, zero 1": (LLAMA, Layout(dp=2, zero=1)),
    "bf16, zero 1": ({**LLAMA, **BF16}, Layout(dp=2, zero=1)),
    "bf16, zero 2": ({**LLAMA, **BF16}, Layout(dp=2, zero=2)),
    "bf16, zero 3": ({**LLAMA, **BF16}, Layout(dp=2, zero=3)),
    "experts, zero 0": (MODELS["llama"], Layout(dp=2, ep=2)),
    "experts, bf16": ({**MODELS["llama"], **BF16}, Layout(dp=2, ep=2, zero=1)),
}


def _value(name: str, key: str, shape: torch.Size) -> torch.Tensor:
    """Something that every number type holds exactly."""
    generator = torch.Generator().manual_seed(stable_seed(name, key))
    return torch.randint(-8, 8, shape, generator=generator).float() / 8


def _by_deepspeed(engine: Any, p: torch.nn.Parameter, stage: int) -> dict[str, torch.Tensor]:
    if stage == 0:
        return {"weight": p.detach(), **{k: engine.deepspeed.optimizer.state[p][k] for k in MOMENTS}}
    return {"weight": safe_get_full_fp32_param(p), **{k: safe_get_full_optimizer_state(p, k) for k in MOMENTS}}


def _wrong(rank: int, keys: dict[str, Any], layout: Layout) -> list[str]:
    engine, args, lr = build(rank, keys, layout)
    wrong: list[str] = []
    for step in range(2):
        engine.train_batch(step_batch(step, args, engine.state), lr(step))
    read = whole_state(engine)
    for name, p in engine.params().items():
        if p.requires_grad and not p.spec.experts:
            expected = _by_deepspeed(engine, p, layout.zero)
            wrong += [f"{name} read"] if read[name].keys() != expected.keys() else []
            wrong += [f"{name}/{k}" for k, v in expected.items() if not torch.equal(read[name][k].view_as(v), v)]
    written = {name: {k: _value(name, k, v.shape) for k, v in values.items()} for name, values in read.items()}
    for name, values in written.items():
        share = engine.share(name)
        engine.write_share(name, {k: v.view(-1)[share.start : share.stop] for k, v in values.items()})
    engine.finish_writing()
    found = whole_state(engine)
    for name, values in written.items():
        wrong += [f"{name}/{k} written" for k, v in values.items() if not torch.equal(found[name][k], v)]
        if layout.zero < 3:  # in the model's type, on every rank: nobody has to gather it for a step
            p = engine.params()[name]
            mine = own_experts(values["weight"], p.spec, engine.state)
            wrong += [f"{name} here"] if not torch.equal(p.detach().float(), mine) else []
    for name, values in written.items():
        share = engine.share(name)
        engine.write_share(name, {"weight": values["weight"].view(-1)[share.start : share.stop]})
    engine.finish_writing()
    for name, values in whole_state(engine).items():  # moments that a checkpoint lacks are not those of before
        wrong += [f"{name}/{k} not reset" for k, v in values.items() if k != "weight" and v.any()]
    out = engine.train_batch(step_batch(2, args, engine.state), lr(2))
    wrong += ["not finite"] if not out.loss.isfinite() else []
    return wrong


def _shares(rank: int, world: int) -> dict[str, list[str]]:
    """What is wrong, by case: calls that torch warns of too, where no optimizer of DeepSpeed makes them."""
    problems: dict[str, list[str]] = {}
    for case, (keys, layout) in CASES.items():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", FutureWarning)
            problems[case] = _wrong(rank, keys, layout)
        ours = layout.zero == 0 or (layout.zero == 1 and "bf16" in case)
        problems[case] += [str(one.message) for one in warned] if ours else []
    return problems


def test_shares_cover_what_the_optimizer_has_and_come_back() -> None:
    for problems in run_distributed(_shares, 2, timeout=150):
        assert problems == {case: [] for case in CASES}
