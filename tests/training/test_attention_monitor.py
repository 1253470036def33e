"""`monitor_attention`: logits and entropy of the attention of the model in training, the same at every layout."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.callbacks.attention_monitor import AttentionMonitor
from megatron.layers.attention import SelfAttention
from megatron.training.progress import Progress
from tests.distributed import run_distributed
from tests.training.models import LLAMA, MAMBA_AND_ATTENTION, MODELS, NEOX
from tests.training.runs import corpus, run
from tests.training.tiny import SEQUENCE, Layout, build, global_batch, step_batch

pytestmark = pytest.mark.cpu

STEP = 9  # the documents of its first sample begin at 0, 4 and 12; some of its targets are trained
LENGTHS = (4, 8, 4)
IDS = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))
WINDOW = 3
PACKED = {
    "intra_document_masking": True,
    "sliding_window_width": WINDOW,
    "attention_config": [[["local", "global"], "all"]],
}
KEYS: dict[str, dict[str, Any]] = {
    "packed": {**NEOX, **PACKED},
    "capped": MODELS["capped"],
    "rpe": MODELS["rpe"],
    "hybrid": {**LLAMA, **MAMBA_AND_ATTENTION},
    "moe": MODELS["moe-documents"],
    "bf16": {**NEOX, **PACKED, "precision": "bfloat16"},
}
# Every model by the means of one that is different: sequence parallelism, pipeline, ZeRO-3, experts, the native engine.
LAYOUTS = [
    ("packed", Layout(pp=2, tp=2, sequence_parallel=True, micro=4)),
    ("packed", Layout(dp=2, zero=3)),
    ("capped", Layout(tp=2, micro=1)),
    ("rpe", Layout(pp=2, micro=1)),
    ("hybrid", Layout(pp=2, micro=4)),
    ("moe", Layout(dp=2, ep=2)),
    ("bf16", Layout(dp=2, zero=1, engine="native")),
]


def monitored(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """The metrics behind a step, and by hand where there is one rank."""
    engine, args, lr = build(rank, {**keys, "monitor_interval": STEP + 1, "monitor_attention": True}, layout)
    state, progress = engine.state, Progress()
    trainer: Any = SimpleNamespace(engine=engine, state=state, step=STEP - 1, metrics={}, settle=lambda: None)
    trainer.progress, trainer.batches = progress, lambda: (step_batch(n, args, state) for n in (STEP - 1, STEP))
    monitor = AttentionMonitor.build(SimpleNamespace(args=args))  # type: ignore[arg-type]
    assert monitor is not None
    monitor.start(trainer)
    for batch in trainer.batches():
        out = engine.train_batch(batch, lr(trainer.step))
        trainer.step += 1
        assert trainer.metrics == {}
        monitor.after_step(trainer, out)
    found = {"metrics": {name: float(value) for name, value in trainer.metrics.items()}}
    return found | ({"by hand": by_hand(engine, args)} if world == 1 and keys == KEYS["packed"] else {})


def by_hand(engine: Any, args: Any) -> dict[str, float]:
    """From what goes into each attention layer, in fp64: projection, rotation of the first half of each head, masks."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    counted = int(global_batch(STEP)[1][0].nonzero()[0].max()) + 1
    inputs: dict[str, torch.Tensor] = {}
    layers = {name: part for name, part in engine.module.named_modules() if isinstance(part, SelfAttention)}
    hooks = [
        part.register_forward_pre_hook(lambda _, given, name=name: inputs.__setitem__(name, given[0].double()))
        for name, part in layers.items()
    ]
    engine.eval_batch(step_batch(STEP, args, engine.state))
    found, everything = {}, []
    place = torch.arange(SEQUENCE)
    for number, (name, part) in enumerate(layers.items()):
        q, k, _ = (inputs[name][:SEQUENCE] @ part.query_key_value.weight.double().T).split((32, 16, 16), dim=1)
        bias = part.query_key_value.bias.double()
        q, k = (q + bias[:32]).view(-1, 4, 8), (k + bias[32:48]).view(-1, 2, 8).repeat_interleave(2, dim=1)
        angle = positions[:, None].double() / 10000.0 ** (torch.arange(2).double() / 2)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        for x in (q, k):
            turned = torch.complex(x[..., :2], x[..., 2:4]) * turn
            x[..., :2], x[..., 2:4] = turned.real, turned.imag
        scores = torch.einsum("snd,tnd->nst", q, k) / math.sqrt(8)
        ahead = place[:, None] - place
        seen = (ahead >= 0) & (IDS[:, None] == IDS)
        if number == 0:
            seen &= ahead <= WINDOW
        scores = scores.masked_fill(~seen, -math.inf)[:, :counted]
        entropy = torch.distributions.Categorical(logits=scores).entropy().mean()
        found[f"attention/layer_{number}/logit_max"], found[f"attention/layer_{number}/entropy"] = (
            float(scores.max()),
            float(entropy),
        )
        everything.append((float(scores.max()), float(entropy)))
    for hook in hooks:
        hook.remove()
    largest, entropies = zip(*everything, strict=True)
    return {**found, "attention/logit_max": max(largest), "attention/entropy": sum(entropies) / 2}


@functools.cache
def reference(model: str) -> dict[str, Any]:
    return run_distributed(monitored, 1, KEYS[model], Layout(micro=8), timeout=110)[0]


def test_on_one_rank_they_are_those_of_the_formula() -> None:
    ours = reference("packed")
    assert ours["metrics"] == pytest.approx(ours["by hand"], rel=1e-5)
    assert 0 < ours["metrics"]["attention/layer_0/entropy"] < math.log(WINDOW + 1)
    assert ours["metrics"]["attention/logit_max"] > 1


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=lambda x: getattr(x, "name", x))
def test_every_layout_has_the_same(model: str, layout: Layout) -> None:
    ours = reference(model)["metrics"]
    for report in run_distributed(monitored, layout.world, KEYS[model], layout, timeout=110):
        assert report["metrics"] == pytest.approx(ours, rel=3e-2 if model == "bf16" else 1e-5)


def test_blocks_without_attention_have_none() -> None:
    assert sorted(reference("hybrid")["metrics"]) == [
        "attention/entropy",
        "attention/layer_1/entropy",
        "attention/layer_1/logit_max",
        "attention/logit_max",
    ]


def test_a_run_logs_them_and_is_the_same_to_the_last_bit(tmp_path: Any) -> None:
    keys = {"data_path": corpus(tmp_path), "train_iters": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    layout = Layout(pp=2, micro=4)
    plain = run(keys, layout)
    watched = run({**keys, "monitor_interval": 2, "monitor_parameters": [], "monitor_attention": True}, layout)
    steps = [step for step, metrics in watched[0].logged if "attention/layer_1/entropy" in metrics]
    assert steps == [2, 4]
    for one, other in zip(plain, watched, strict=True):
        assert one.loss == other.loss and one.state == other.state and one.state
