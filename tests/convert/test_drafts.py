"""Whole or not at all: full disks, killed processes, places that cannot be written."""

from __future__ import annotations

import errno
import os

import pytest

from megatron.checkpoint.tensor_file import TensorFileWriter
from megatron.convert.drafts import draft_of, publish
from megatron.convert.hf import export_hf as export_module
from megatron.convert.hf.export_hf import export
from megatron.convert.hf.import_hf import import_model
from megatron.convert.raw.export_raw import export_raw
from megatron.errors import MachineError, UserError
from tests.convert.helpers import LLAMA, hugging_face, random_tensors, resolved, write_checkpoint

pytestmark = pytest.mark.cpu

GONE = 999999999  # no process has this number


def full(*_args, **_options):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path, monkeypatch):
    args = resolved(**LLAMA)
    write_checkpoint(tmp_path / "ckpt", args, random_tensors(args, "llama"))
    model, _ = hugging_face(args, "llama")
    model.save_pretrained(tmp_path / "hf")
    monkeypatch.setattr(TensorFileWriter, "add", full)
    monkeypatch.setattr(export_module, "write_safetensors", full)
    for convert, flag in (
        (lambda: export(tmp_path / "ckpt", tmp_path / "out", tokenizer=False), "--output_dir"),
        (lambda: export_raw(tmp_path / "ckpt", tmp_path / "out"), "--output_dir"),
        (lambda: import_model(str(tmp_path / "hf"), tmp_path / "out"), "--output-dir"),
    ):
        with pytest.raises(MachineError, match=f"{flag}: .*/out: No space left on device"):
            convert()
        assert sorted(os.listdir(tmp_path)) == ["ckpt", "hf"]


def test_a_place_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(UserError, match="--output_dir: .*file/out cannot be made: Not a directory"),
        draft_of(tmp_path / "file" / "out", "--output_dir"),
    ):
        pass


def test_what_killed_processes_left_is_removed_or_restored(tmp_path):
    for name in (f".out.draft-{GONE}", f".out.older-{GONE}", f".other.draft-{GONE}", f".out.draft-{os.getppid()}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with draft_of(tmp_path / "out", "--output_dir"):
        assert (tmp_path / "out" / "file").read_text() == f".out.older-{GONE}"
    assert sorted(os.listdir(tmp_path)) == [f".other.draft-{GONE}", f".out.draft-{os.getppid()}", "out"]


def test_the_old_folder_is_kept_until_the_new_one_is_complete(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with draft_of(tmp_path / "out", "--output_dir") as draft:
        (draft / "new").touch()
        publish(draft, tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["new"]


def test_messages_name_the_folder_that_was_asked_for(tmp_path):
    with (
        pytest.raises(UserError, match=f"^{tmp_path}/out/config.yml: seq_length must be set$"),
        draft_of(tmp_path / "out", "--output-dir") as draft,
    ):
        raise UserError(f"{draft}/config.yml: seq_length must be set")
    assert os.listdir(tmp_path) == []
