"""Texts while training: those of generate.py, at another layout too, and nothing else changes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.errors import UserError
from megatron.inference.modes import write_texts
from megatron.neox_arguments.inference import for_inference
from tests.callbacks.fakes import args_of
from tests.distributed import run_distributed
from tests.inference.models import GPT_NEOX
from tests.tokenizer.vocabularies import byte_level, write_json
from tests.training import runs
from tests.training.runs import corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

# Dropout included: random states that differ would show in the losses.
KEYS = {**GPT_NEOX, "hidden_dropout": 0.1, "tokenizer_type": "HFTokenizer", "train_iters": 4}
KEYS |= {"maximum_tokens": 7, "temperature": 0.8, "top_k": 20}
PROMPTS = ["hello", "  two words", "x"]
derive = runs.derive


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("samples")
    declared = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    vocab_file = write_json(folder / "tokenizer" / "tokenizer.json", byte_level(), tokenizer_config=declared)
    (folder / "prompts.txt").write_text("|".join(PROMPTS))
    given = {"vocab_file": str(vocab_file), "data_path": corpus(folder / "data"), "prompt_end": "|"}
    return {**KEYS, **given, "sample_prompts": str(folder / "prompts.txt")}


def generate(rank: int, world: int, keys: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    """What `generate.py` writes."""
    with mock.patch.object(runs, "derive", lambda args, facts: derive(for_inference(args), facts)):
        more = {"load": keys["save"], "sample_input_file": keys["sample_prompts"], "sample_output_file": "out.jsonl"}
        process = runs.process_of(rank, {**keys, **more}, Layout())
    os.chdir(folder)
    assert write_texts(process) == 0
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_texts_are_those_of_generate_and_training_does_not_notice(tmp_path: Path, keys: dict[str, Any]) -> None:
    layout = Layout(pp=2, dp=2)
    save = tmp_path / "run"
    with_samples = {**keys, "save": str(save), "sample_every": 2, "tensorboard_dir": str(tmp_path / "tb")}
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        reports = run(with_samples, layout)
    lines = [json.loads(line) for line in (save / "samples.jsonl").read_text().splitlines()]
    assert [(one["step"], one["prompt"]) for one in lines] == [(step, text) for step in (2, 4) for text in PROMPTS]
    printed = re.findall(r"sample at iteration (\d) \| (.*) -> (.*)", shown.getvalue())
    assert printed == [(str(one["step"]), repr(one["prompt"]), repr(one["text"])) for one in lines]

    again = run_distributed(generate, 1, {**keys, "save": str(save)}, str(tmp_path))[0]
    assert [(one["context"], one["text"]) for one in again] == [(one["prompt"], one["text"]) for one in lines[3:]]
    assert any(one["text"] for one in lines)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (first, last) = events.Tensors("samples/0/text_summary")
    assert (first.step, last.step) == (2, 4) and b"hello" in last.tensor_proto.string_val[0]

    without = run({**keys, "save": str(tmp_path / "bare")}, layout)
    for report, bare in zip(reports, without, strict=True):
        assert report.loss == bare.loss and report.grad_norm == bare.grad_norm and report.state == bare.state


def test_what_is_missing_is_said_before_the_run(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"sample_every: .*sample_prompts"):
        args_of(sample_every=3)
    for bad, message in (("absent.txt", "does not exist"), ("blank.txt", "holds no prompt")):
        (tmp_path / "blank.txt").write_text(" \n")
        wrong = {"sample_every": 1, "sample_prompts": str(tmp_path / bad), "save": str(tmp_path / "run")}
        (report,) = run({**keys, **wrong}, Layout())
        assert report.exit_code == 2 and re.search(f"sample_prompts: .*{bad} {message}", report.error or "")
