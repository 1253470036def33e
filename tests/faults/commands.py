"""Small folders with data and a config, and deepy.py run in them as a user does."""

from __future__ import annotations

import atexit
import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.corpus import write

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """\
num-layers: 2
hidden_size: 16
num_attention_heads: 2
seq_length: 8
max_position_embeddings: 8
train_micro_batch_size_per_gpu: 1
train_iters: 2
eval_iters: 0
split: "1"
optimizer: {type: Adam, params: {lr: 1.0e-3}}
tokenizer_type: CharLevelTokenizer
data_path: data/x
"""


def make_folder(folder: Path, config: str = CONFIG) -> Path:
    """`run.yml`, and `data/x` with 20 documents of 40 bytes."""
    (folder / "run.yml").write_text(config, encoding="utf-8")
    write(folder / "data/x", [[65 + (i + j) % 26 for j in range(40)] for i in range(20)])
    return folder


def environment() -> dict[str, str]:
    """That of a user on a machine without a GPU, outside any launcher."""
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DLTS_HOSTFILE", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if k not in drop and not k.startswith(("SLURM", "OMPI"))}
    return env | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def deepy(
    folder: Path, *argv: str, script: str = "train.py", timeout: float = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    """`python deepy.py <script> run.yml <argv>` in `folder`."""
    command = [sys.executable, str(ROOT / "deepy.py"), str(ROOT / script), "run.yml", *argv]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment() | env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def deepy_here(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    folder: Path,
    *argv: str,
    script: str = "train.py",
) -> tuple[int, str, str]:
    """The same in this process, for commands that end before a rank starts: exit code, stdout, stderr."""
    logger = logging.getLogger("deepy")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    monkeypatch.setattr(os, "environ", environment())
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["deepy.py", str(ROOT / script), "run.yml", *argv])
    monkeypatch.setattr(os, "_exit", sys.exit)  # a run leaves at once, and would take pytest along
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)  # those of pytest are not yet due
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "deepy.py"), run_name="__main__")
    assert isinstance(end.value.code, int)
    return end.value.code, *capfd.readouterr()


def files(folder: Path) -> set[str]:
    """Every file and folder below, with the size of files: what a command may not have changed."""
    return {
        f"{path.relative_to(folder)} {path.stat().st_size if path.is_file() else 'd'}" for path in folder.rglob("*")
    }
