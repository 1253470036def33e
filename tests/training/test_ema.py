"""The moving average of the weights against its closed form in fp64, at layouts that cut the weights in every way; what
evaluation sees; and checkpoints, also at another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.save import save_checkpoint
from megatron.convert.hf.export_hf import export
from megatron.errors import UserError
from megatron.mpu.sharding import named_parameters, shard
from tests.distributed import run_distributed
from tests.inference.models import stage_of
from tests.training.tiny import LLAMA, Layout, build, step_batch, whole_state

pytestmark = pytest.mark.cpu

DECAY, STEPS = 0.75, 4
BF16 = {"precision": "bfloat16"}
ON = {**LLAMA, "ema_decay": DECAY}
CASES: dict[str, tuple[dict[str, Any], Layout]] = {
    "zero 0": (ON, Layout(dp=2)),
    "zero 1": ({**ON, **BF16}, Layout(dp=2, zero=1)),
    "zero 2": (ON, Layout(dp=2, zero=2)),
    "zero 3": ({**ON, **BF16}, Layout(dp=2, zero=3)),
    "tp": (ON, Layout(tp=2)),
    "pp": ({**ON, **BF16}, Layout(pp=2, zero=1)),
    "native": (ON, Layout(dp=2, engine="native", zero=1)),
    "native bf16": ({**ON, **BF16}, Layout(dp=2, engine="native", zero=1)),
}


def _break(engine: Any, name: str) -> None:
    """A gradient that is not finite: the step is skipped."""
    engine.grads()[name].view(-1)[:1] = torch.inf


def _wrong(rank: int, keys: dict[str, Any], layout: Layout, folder: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    engine, args, lr = build(rank, keys, layout)
    state, wrong = engine.state, []
    expected = {name: values["weight"].double() for name, values in whole_state(engine).items()}
    for step in range(STEPS):
        engine.before_update = None
        if step == 1:  # on one rank: all skip
            engine.before_update = lambda: _break(engine, next(iter(engine.grads())))
        out = engine.train_batch(step_batch(step, args, state), lr(step))
        wrong += [f"step {step}"] if bool(out.skipped) != (step == 1) else []
        if not bool(out.skipped):
            for name, values in whole_state(engine).items():
                expected[name] = DECAY * expected[name] + (1 - DECAY) * values["weight"].double()
    engine.before_update = None
    found = whole_state(engine)
    for name, mean in expected.items():
        error = (found[name]["ema"].double() - mean).abs().max()
        wrong += [f"{name}: off by {error}"] if error > 1e-6 else []
        wrong += [f"{name}: is the weight"] if torch.equal(found[name]["ema"], found[name]["weight"]) else []
    batch = step_batch(9, args, state)
    raw = engine.eval_batch(batch).sums
    with engine.averaged():
        averaged = engine.eval_batch(batch).sums
    again = engine.eval_batch(batch).sums
    restored = whole_state(engine)
    wrong += [f"{name}/{k}" for name, v in found.items() for k in v if not torch.equal(v[k], restored[name][k])]
    # The loss of a model whose weights are those averages.
    config = {"heads": Heads.of(args.model), "consumed": 0, "client": {}, "config": args.to_dict()}
    save_checkpoint(folder, STEPS, engine, state, **config)
    other, *_ = build(rank, {**keys, "ema_decay": None}, layout)
    for name in other.params():
        share = other.share(name)
        mean = found[name].get("ema", found[name]["weight"])
        other.write_share(name, {"weight": mean.reshape(-1)[share.start : share.stop]})
    other.finish_writing()
    alone = other.eval_batch(batch).sums
    wrong += [] if torch.equal(raw, again) and torch.equal(averaged, alone) else [f"{raw} {again} {averaged} {alone}"]
    wrong += ["the average evaluates as the weights do"] if torch.equal(raw, averaged) else []
    # Back at once: bit by bit, and so is the next step.
    resumed, *_ = build(rank, keys, layout)
    load_checkpoint(find_checkpoint(folder, None), resumed, state, heads=Heads.of(args.model))
    for one in (engine, resumed):
        one.train_batch(step_batch(STEPS, args, state), lr(STEPS))
    left, right = whole_state(engine), whole_state(resumed)
    wrong += [f"{name}/{k} resumed" for name, v in left.items() for k in v if not torch.equal(v[k], right[name][k])]
    return wrong, {name: values["ema"] for name, values in found.items()}


def _averages(rank: int, world: int, folder: str) -> tuple[dict[str, list[str]], torch.Tensor]:
    found = {}
    saved = {}
    for case, (keys, layout) in CASES.items():
        found[case], saved[case] = _wrong(rank, keys, layout, f"{folder}/{case}")
    for case, keys, layout in (("zero 0", ON, Layout(tp=2)), ("zero 3", {**ON, **BF16}, Layout(pp=2, zero=1))):
        engine, args, _ = build(rank, keys, layout)
        load_checkpoint(find_checkpoint(f"{folder}/{case}", None), engine, engine.state, heads=Heads.of(args.model))
        for name, values in whole_state(engine).items():
            spec = engine.params()[name].spec
            mean = shard(saved[case][name][: spec.shape[0]], spec, engine.state.tp_rank, layout.tp)  # without padding
            found[case] += [f"{name} at {layout.name}"] if not torch.equal(values["ema"], mean) else []
    return found, saved["tp"]["0.word_embeddings.weight"]


def _without(rank: int, world: int, folder: str) -> list[str]:
    """A checkpoint of a run that kept no average."""
    engine, args, lr = build(rank, LLAMA, Layout())
    engine.train_batch(step_batch(0, args, engine.state), lr(0))
    heads = Heads.of(args.model)
    save_checkpoint(folder, 1, engine, engine.state, heads=heads, consumed=0, client={}, config=args.to_dict())
    resumed, *_ = build(rank, ON, Layout())
    load_checkpoint(find_checkpoint(folder, None), resumed, engine.state, heads=heads)
    wrong = [
        f"{name} begins elsewhere" for name, v in whole_state(resumed).items() if not (v["ema"] == v["weight"]).all()
    ]
    for one in (engine, resumed):
        one.train_batch(step_batch(1, args, engine.state), lr(1))
    after = whole_state(resumed)
    return wrong + [k for k, v in whole_state(engine).items() if not torch.equal(v["weight"], after[k]["weight"])]


def test_the_average_is_that_of_the_formula_at_every_layout(tmp_path: Path) -> None:
    ranks = run_distributed(_averages, 2, str(tmp_path), timeout=240)
    for found, _ in ranks:
        assert found == {case: [] for case in CASES}
    export(tmp_path / "tp", tmp_path / "hf", averaged=True, tokenizer=False, check=False)
    table = load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(table, torch.cat([embedding for _, embedding in ranks])[: len(table)])
    for evaluates in (True, False):  # generate.py and eval.py
        stage = stage_of(tmp_path / "tp" / f"global_step{STEPS}", {**ON, "save": "run", "ema_evaluate": evaluates})
        held = dict(named_parameters(stage.layers[0]))["0.word_embeddings.weight"]
        assert torch.equal(held[: len(table)], table) == evaluates
    assert run_distributed(_without, 1, str(tmp_path / "without"), timeout=120) == [[]]
    with pytest.raises(UserError, match=r"global_step1 has no average .*ema_decay"):
        export(tmp_path / "without", tmp_path / "no", averaged=True, tokenizer=False, check=False)
