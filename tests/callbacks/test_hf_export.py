"""Hugging Face exports while training: which checkpoints, that no step waits, what is held, and what a restart does."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.callbacks.context import RunContext
from megatron.callbacks.hf_export import NAME, HfExport
from megatron.cluster.exports import Exports
from megatron.convert.hf.export_hf import export
from megatron.errors import UserError
from megatron.mpu.state import ParallelState
from megatron.training.trainer import Trainer
from tests.callbacks.fakes import args_of, trainer_of
from tests.hub.upload_server import UploadHub
from tests.inference.models import GPT_NEOX
from tests.tokenizer.vocabularies import byte_level, write_json
from tests.training.runs import corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

WAITS = 'until [ -e "$0/go$1" ]; do sleep 0.01; done; if [ -e "$0/bad$1" ]; then echo no room; exit 7; fi; '
MAKES = 'mkdir -p "$0/global_step$1" && touch "$0/global_step$1/config.json"'


@dataclass(frozen=True)
class Slow(Exports):
    """Exports that take until the test says `go`, or `bad`."""

    begun: list[int] = field(default_factory=list)

    def start(self, step: int) -> Any:
        self.begun.append(step)
        with self.log.open("ab") as log:
            command = ["sh", "-c", WAITS + MAKES, str(self.folder), str(step)]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def go(self, step: int, bad: bool = False) -> None:
        for name in ("bad", "go") if bad else ("go",):
            (self.folder / f"{name}{step}").touch()


@dataclass
class Run:
    exports: Slow
    callback: HfExport
    trainer: Trainer

    @classmethod
    def start(cls, folder: Path, every: int = 2, saved: int | None = None) -> Run:
        exports = Slow(folder, folder)
        callback = HfExport(exports, every)
        trainer = trainer_of([callback])
        trainer.saved_step = saved
        callback.loaded(trainer)
        return cls(exports, callback, trainer)

    def save(self, step: int) -> None:
        self.trainer.step = self.trainer.saved_step = step
        self.callback.saved(self.trainer, "")

    def step(self) -> None:
        """A step that finds the process under way ended."""
        if (process := self.callback._process) is not None:
            process.wait(timeout=20)
        self.callback.after_step(self.trainer, None)  # type: ignore[arg-type]

    @property
    def held(self) -> set[int]:
        return self.trainer.held_checkpoints[NAME]


def test_one_at_a_time_the_newest_waits_and_no_step_does(tmp_path: Path) -> None:
    found = Run.start(tmp_path)
    found.save(1)
    for step in (2, 3, 5, 6):  # while the first is under way
        found.save(step)
        found.callback.after_step(found.trainer, None)  # type: ignore[arg-type]
    assert found.exports.begun == [1] and found.held == {1, 5}
    found.exports.go(1)
    found.step()
    assert found.exports.begun == [1, 5] and found.held == {5} and found.exports.steps() == [1]
    found.exports.go(5)
    found.step()
    assert found.held == set() and found.exports.steps() == [1, 5]


def test_the_last_checkpoint_of_a_finished_run_is_waited_for(tmp_path: Path) -> None:
    found = Run.start(tmp_path, every=100)
    found.save(4)
    found.save(10)  # train_iters
    for step in (4, 10):
        found.exports.go(step)
    found.callback.end(found.trainer)
    assert found.exports.steps() == [4, 10]


def test_a_run_that_stops_goes_at_once_and_the_next_start_exports(tmp_path: Path) -> None:
    found = Run.start(tmp_path)
    found.save(2)
    process = found.callback._process
    found.callback.end(found.trainer)
    assert process is not None and process.returncode == -9 and found.exports.steps() == []
    again = Run.start(tmp_path, saved=2)
    assert again.exports.begun == [2]
    again.exports.go(2)
    again.step()
    third = Run.start(tmp_path, saved=2)
    assert third.exports.begun == []
    third.save(3)
    third.save(4)
    assert third.exports.begun == [4]
    third.callback.error(third.trainer, RuntimeError())


def test_an_export_that_fails_is_a_warning_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = Run.start(tmp_path)
    found.save(2)
    found.save(4)
    found.exports.go(2, bad=True)
    found.step()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "iteration 2 is not exported: no room (exit code 7" in warning and str(found.exports.log) in warning
    assert found.exports.begun == [2, 4]
    found.callback.error(found.trainer, RuntimeError())


def test_what_cannot_be_exported_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hf_save_interval: save is not set"):
        args_of(hf_save_interval=2)
    args = args_of(hf_save_interval=2, save=str(tmp_path), pos_emb="rpe")
    with pytest.raises(UserError, match="hf_save_interval: no Hugging Face architecture"):
        HfExport.build(RunContext(args, ParallelState.single("cpu"), 64))


@pytest.mark.slow
def test_a_run_exports_what_transformers_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The average of the weights, where there is one."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    declared = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    vocab_file = write_json(tmp_path / "tokenizer" / "tokenizer.json", byte_level(), tokenizer_config=declared)
    keys = {**GPT_NEOX, "norm": "layernorm", "activation": "gelu", "intermediate_size": None, "num_kv_heads": 4}
    keys |= {"tokenizer_type": "HFTokenizer", "vocab_file": str(vocab_file), "data_path": corpus(tmp_path / "data")}
    keys |= {"train_iters": 4, "checkpoint_factor": 4, "hf_save_interval": 3, "ema_decay": 0.5}
    keys |= {"hf_upload_repo": "me/tiny"}
    with UploadHub() as hub:
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        reports = run({**keys, "save": str(tmp_path / "save")}, Layout(pp=2))
    made = {path.name: path.read_bytes() for path in (tmp_path / "save/hf/global_step4").iterdir()}
    assert hub.models["me/tiny"].branches["main"] == hub.models["me/tiny"].branches["global_step4"] == made
    assert [report.exit_code for report in reports] == [0] * 2, reports[0].error
    assert Exports(tmp_path, tmp_path / "save" / "hf").steps() == [4]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "save" / "hf" / "global_step4", dtype=torch.float32)
    assert sum(p.numel() for p in theirs.parameters()) > 0
    by_hand = export(tmp_path / "save" / "global_step4", tmp_path / "by_hand", averaged=True).folder
    expected, found = (
        load_file(folder / "model.safetensors") for folder in (by_hand, tmp_path / "save/hf/global_step4")
    )
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
