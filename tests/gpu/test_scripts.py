"""`make gpu` and its scripts, with a python3 that only says what it is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
# No DeepSpeed, no package index, and a GPU if $GPU is set.
PYTHON = """#!/usr/bin/env bash
case "$*" in
*"import torch"*) [ -n "$GPU" ] ;;
*) echo "$*" >>calls; exit 1 ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of a checkout that the scripts need, without a .venv."""
    for name in ("Makefile", "tests/gpu/run.sh", "tests/gpu/wheels.sh", "requirements/requirements.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def run(tree: Path, *command: str, gpu: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{tree / 'bin'}:{os.environ['PATH']}", "GPU": gpu}
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("gpu", "code"), [("yes", 1), ("", 2)])
def test_wheels_are_tried_once_with_and_without_a_gpu(tree: Path, gpu: str, code: int) -> None:
    assert run(tree, "bash", "tests/gpu/run.sh", gpu=gpu).returncode == code
    (tree / "calls").unlink(missing_ok=True)
    done = run(tree, "make", "gpu", gpu=gpu)
    assert done.returncode != 0 and "no wheels" in done.stderr
    assert (tree / "calls").read_text().count("pip wheel") == 1


@pytest.mark.parametrize("script", ["run", "wheels"])
def test_help_is_said_and_nothing_done(tree: Path, script: str) -> None:
    before = {*tree.rglob("*")}
    done = run(tree, "bash", f"tests/gpu/{script}.sh", "--help", gpu="yes")
    assert done.returncode == 0 and f"bash tests/gpu/{script}.sh" in done.stdout and "#" not in done.stdout
    assert {*tree.rglob("*")} == before
