"""Runs that begin with the weights of a checkpoint of GPT-NeoX, at any layout, whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.neox_files import write_neox
from tests.convert import helpers
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


def test_a_run_of_theirs_is_not_resumed(made, tmp_path):
    assert "finetune: true" in start(made, "theirs", finetune=False).error
    error = start(made, "theirs", save=made["theirs"]).error
    assert "holds checkpoints of GPT-NeoX" in error and "another one in `save`" in error
