"""git-lfs pointers, which a clone without git-lfs leaves in the place of large files: every reader names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.foreign import load_foreign
from megatron.data.tokenise.formats import read_chunks
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError
from megatron.files import read_json, refuse_lfs_pointer
from megatron.tokenizer import create_tokenizer

pytestmark = pytest.mark.cpu

# The example of git-lfs's own specification (docs/spec.md there).
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def read_text(path: Path) -> list[Any]:
    return list(read_chunks([path]))


READERS: dict[str, Callable[[Path], Any]] = {
    "tokenizer.json": lambda path: create_tokenizer("HFTokenizer", str(path.parent)),
    "vocab.json": lambda path: create_tokenizer("GPT2BPETokenizer", str(path), str(path)),
    "spm.model": lambda path: create_tokenizer("SPMTokenizer", str(path)),
    "texts.parquet": read_text,
    "texts.jsonl": read_text,
    "texts.jsonl.gz": read_text,
    "texts.txt": read_text,
    "tokens.idx": lambda path: IndexedDataset(path.with_suffix("")),
    "tokens.bin": lambda path: (path.with_suffix(".idx").write_bytes(b"whole"), IndexedDataset(path.with_suffix(""))),
    "layer_00-model_00-model_states.pt": load_foreign,
    "config.json": read_json,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_is_named_with_the_command_that_fetches_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(POINTER)
    if path.suffix == ".idx":
        path.with_suffix(".bin").write_bytes(b"")
    with pytest.raises(UserError, match=rf"{name} is a git-lfs pointer.*`git lfs pull` in {tmp_path}"):
        READERS[name](path)


def test_a_text_about_pointers_is_none(tmp_path: Path) -> None:
    for text in ("", "version", f"# {POINTER}", POINTER + "x" * 1024):  # a pointer is shorter than 1024 bytes
        (tmp_path / "a.txt").write_text(text)
        refuse_lfs_pointer(tmp_path / "a.txt")
    refuse_lfs_pointer(tmp_path / "missing")
    refuse_lfs_pointer(tmp_path)
