"""Runs that begin with a checkpoint of GPT-NeoX, at any layout: with its weights alone, or as its run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import neox_engine
from tests.checkpoint.neox_files import write_neox
from tests.convert import helpers
from tests.distributed import run_distributed
from tests.training.runs import KEYS, Report, corpus, run
from tests.training.tiny import NEOX, Layout

pytestmark = pytest.mark.cpu

TOKENS = 512  # of the tokenizer of characters
# Of the parallel form, with biases in every layer.
MODEL = {**NEOX, "num_kv_heads": 4, "rotary_pct": 0.5, "make_vocab_size_divisible_by": 8}
LAYOUTS = {"tp 1": Layout(), "tp 2": Layout(tp=2), "pp 2": Layout(pp=2)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same weights as GPT-NeoX's files of two ranks and as a checkpoint of ours, and a corpus."""
    folder = tmp_path_factory.mktemp("start")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers, "VOCAB", TOKENS)
        args = helpers.resolved(**{**keys(), "train_micro_batch_size_per_gpu": 8})
        theirs = helpers.hugging_face(args, "neox")[1]
        write_neox(folder / "theirs" / "global_step9", theirs, keys(), tp=2, form="whole", names="legacy")
        helpers.write_checkpoint(folder / "ours", args, helpers.full_tensors(args, "neox", theirs))
    return {"theirs": str(folder / "theirs"), "ours": str(folder / "ours"), "data_path": corpus(folder / "data")}


def keys() -> dict[str, Any]:
    """Model and schedule of a run; what `KEYS` says of a Llama is taken back."""
    llama = {"norm": "layernorm", "activation": "gelu", "intermediate_size": None, "gated_width_rule": None}
    return {**KEYS, **MODEL, **llama, "no_weight_tying": True, "gpt_j_residual": True, "train_iters": 2}


def start(made: dict[str, Any], whose: str, layout: Layout | None = None, **more: Any) -> Report:
    return run({**keys(), "data_path": made["data_path"], "load": made[whose], "finetune": True, **more}, layout)[0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_it_trains_as_from_the_same_weights_of_ours(made, layout):
    theirs, ours = start(made, "theirs", layout), start(made, "ours", layout)
    assert not theirs.error and not ours.error
    assert theirs.steps == [1, 2] and theirs.tokens == ours.tokens
    assert theirs.loss == pytest.approx(ours.loss, abs=1e-6)
    fresh = run({**keys(), "data_path": made["data_path"]}, layout)[0]
    assert abs(fresh.loss[0] - theirs.loss[0]) > 1e-3


def test_steps_are_counted_on_from_init_from_and_the_run_continues(made, tmp_path):
    init = {"path": made["theirs"], "optimizer": "reset", "data": "restart", "step": "continue"}
    base = {**keys(), "data_path": made["data_path"], "save": str(tmp_path / "save"), "init_from": init}
    first = run({**base, "train_iters": 11, "lr_decay_iters": 20})[0]
    assert not first.error and first.steps == [10, 11]
    assert first.loss[0] == pytest.approx(start(made, "theirs").loss[0], abs=1e-6)
    assert (Path(base["save"]) / "global_step11" / "manifest.json").is_file()
    on = run({**base, "train_iters": 12, "lr_decay_iters": 20})[0]
    assert not on.error and on.steps == [12]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that DeepSpeed wrote after 3 steps of 8 samples, from two data ranks under ZeRO 1."""
    folder = tmp_path_factory.mktemp("stopped") / "global_step3"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers, "VOCAB", TOKENS)
        theirs = helpers.hugging_face(helpers.resolved(**{**keys(), "train_micro_batch_size_per_gpu": 8}), "neox")[1]
    write_neox(folder.parent / "weights", theirs, keys(), form="whole")
    module = torch.load(folder.parent / "weights/mp_rank_00_model_states.pt", weights_only=False)["module"]
    shard = {name.removeprefix("sequential."): tensor for name, tensor in module.items()}
    schedule = {"start_lr": 1e-3, "min_lr": 1e-4, "decay_style": "cosine", "end_iter": 20, "warmup_iter": 0.2 * 20}
    state = {"lr_scheduler": {**schedule, "num_iters": 3}}
    run_distributed(neox_engine.save, 2, folder, [shard], "zero 1", 3, state)
    return str(folder)


def go_on(made: dict[str, Any], stopped: str, layout: Layout | None = None, **more: Any) -> Report:
    base = {**keys(), "data_path": made["data_path"], "train_iters": 6, "lr_decay_iters": 20}
    return run({**base, "load": stopped, **more}, layout)[0]


def test_a_run_of_theirs_goes_on_at_any_layout(made, stopped, tmp_path):
    first = go_on(made, stopped, save=str(tmp_path / "save"), exit_interval=5)
    assert not first.error and first.steps == [4, 5]
    fresh = run({**keys(), "data_path": made["data_path"], "train_iters": 6, "lr_decay_iters": 20})[0]
    assert first.lr == fresh.lr[3:5] and first.tokens == fresh.tokens[3:5]
    for layout in (Layout(pp=2), Layout(tp=2), Layout(dp=2, zero=1)):
        other = go_on(made, stopped, layout)
        assert other.loss[:2] == pytest.approx(first.loss, abs=1e-5)
    second = go_on(made, stopped, save=str(tmp_path / "save"))
    assert second.steps == [6] and second.loss[0] == pytest.approx(other.loss[2], abs=1e-5)
    new = go_on(made, stopped, no_load_optim=True)
    assert new.steps == [4, 5, 6] and new.loss[0] == pytest.approx(first.loss[0], abs=1e-6)
    assert abs(new.loss[1] - first.loss[1]) > 1e-4  # the moments were of use


def test_another_optimizer_or_schedule_than_theirs_is_refused(made, stopped):
    lion = {"type": "Lion", "params": {"lr": 1e-3}}
    error = go_on(made, stopped, optimizer=lion).error
    assert "['exp_avg', 'exp_avg_sq']" in error and "['exp_avg']" in error and "no_load_optim: true" in error
    error = go_on(made, stopped, lr_decay_iters=40).error
    assert "lr_decay_iters: 20 in the checkpoint, now 40" in error and "override_lr_scheduler: true" in error


def test_adapters_on_files_of_gpt_neox_resume_with_them(made, tmp_path):
    """The base is named by the adapters' checkpoint, whoever wrote it; a run that goes on is the run that never
    stopped."""
    lora = {"lora_r": 2, "use_dora": True, "train_iters": 3}
    straight = start(made, "ours", **lora)
    first = start(made, "theirs", Layout(tp=2), **lora, save=str(tmp_path / "save"), exit_interval=1)
    again = start(made, "theirs", Layout(dp=2, zero=1), **lora, save=str(tmp_path / "save"))
    assert not straight.error and not first.error and not again.error and again.steps == [2, 3]
    assert [*first.loss, *again.loss] == pytest.approx(straight.loss, rel=1e-5)
