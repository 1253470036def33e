"""A new family is one new file in the folder of families, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.plugins.helpers import ROOT, save_starcoder2, write_family

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]


def run(tree: Path, script: str, *flags: str) -> str:
    """stdout of a script of `tree` in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tree / script), *flags]
    done = subprocess.run(command, cwd=tree.parent, env=environment, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_in_the_folder_of_families_converts_both_ways(tmp_path: Path) -> None:
    """The guide's family, in a copy of the tree; every command is a process of its own."""
    tree = tmp_path / "tree"
    for part in ("megatron", "huggingface", "tools"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    save_starcoder2(tmp_path / "theirs")
    write_family(tree / "megatron/convert/families")
    run(tree, "huggingface/convert_hf_to_neox.py", "--hf-model", "theirs", "--output-dir", "ours")
    flags = ("--input_dir", "ours", "--output_dir", "again", "--no_save_tokenizer")
    out = run(tree, "tools/ckpts/convert_neox_to_hf.py", *flags)
    assert "Starcoder2ForCausalLM" in out
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    compared = run(tree, "tools/ckpts/inspect_checkpoints.py", "theirs", "--diff", "ours")
    fused = 2 * 2 * 2  # of two layers, q, k and v are one weight and one bias
    assert "(starcoder2)" in compared and f"{len(after) - fused} parameters are equal" in compared
