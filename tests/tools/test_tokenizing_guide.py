"""documentation/tokenizing.md: every command in it works as written, and does what the text around it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.tokens.indexed import IndexedDataset
from megatron.tokenizer import TOKENIZERS
from megatron.tokenizer.train import train_bpe
from tests.tools.command import ROOT

pytestmark = pytest.mark.cpu

GUIDE = (ROOT / "documentation" / "tokenizing.md").read_text(encoding="utf-8")
FIRST = "python prepare_data.py stdlib -d data\n"  # half a minute: it has tests of its own

# What `srun -n N command` does, one task after the other.
SRUN = """#!/bin/bash
[ "$1" = -n ] || exit 64
tasks=$2; shift 2
for ((rank = 0; rank < tasks; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=$tasks "$@" || exit
done
"""


def test_every_command_works(tmp_path: Path) -> None:
    for name in ("tools", "prepare_data.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN)
    (programs / "srun").chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    train_bpe([f"document {i} title" for i in range(100)], 300, tmp_path / "data" / "stdlib" / "tokenizer.json")
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert len(blocks) >= 7
    assert blocks[0].startswith(FIRST)
    script = "set -e\n" + "".join(blocks).removeprefix(FIRST)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = (tmp_path / "data" / "corpus_text_document.bin").read_bytes()
    for name in ("whole", "three_joined"):
        assert (tmp_path / "data" / f"{name}_text_document.bin").read_bytes() == whole
    assert len(IndexedDataset(tmp_path / "data" / "all_text_document")) == 40_000


def test_every_tokenizer_type_is_named() -> None:
    assert [name for name in TOKENIZERS if f"`{name}`" not in GUIDE] == []


def test_every_flag_named_exists() -> None:
    tools = ("preprocess_data", "merge_datasets", "dataset_token_count", "train_tokenizer")
    source = "".join((ROOT / "tools" / "datasets" / f"{tool}.py").read_text() for tool in tools)
    source += (ROOT / "megatron" / "data" / "tokenise" / "flags.py").read_text()
    named = set(re.findall(r"--[a-z][a-z_-]+", re.sub(r"```sh\n.*?```", "", GUIDE, flags=re.DOTALL)))
    assert {flag for flag in named if f'"{flag}"' not in source} <= {"--array", "--ntasks-per-node", "--help"}
