"""A run that has ended, the same while it trained, and one that met NaN."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.callbacks.fakes import out
from tests.monitor.runs import change, train

NAN = [out(), out(), *(out(math.nan, math.nan, skipped=True) for _ in range(3))]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ended`, `running` (7 of 10 steps), `nan` (5 steps, the last 3 NaN) of job 4007, with their logs `NAME.out`."""
    folder = tmp_path_factory.mktemp("monitored") / "checkpoints"
    before = os.environ.get("SLURM_JOB_ID")
    os.environ["SLURM_JOB_ID"] = "4007"
    try:
        text = train(folder / "ended", at=7, to=folder / "running")
        train(folder / "was_nan", outs=NAN, at=5, to=folder / "nan", max_skipped_steps=0, eval_iters=0)
    finally:
        del os.environ["SLURM_JOB_ID"]
        if before is not None:
            os.environ["SLURM_JOB_ID"] = before
    lines = text.splitlines(keepends=True)
    upto = next(i for i, line in enumerate(lines) if "iteration        7/" in line)
    (folder / "running.out").write_text("".join(lines[: upto + 1]))
    shutil.copy(folder / "was_nan.out", folder / "nan.out")
    return folder


@pytest.fixture
def place(written: Path, tmp_path: Path) -> Callable[..., Path]:
    """`place("running", age=5, ...)`: a fresh copy of one of them, its status changed; returns the folder."""

    def copy(name: str, to: str | None = None, **fields: object) -> Path:
        folder = tmp_path / (to or name)
        shutil.copytree(written / name, folder, ignore=shutil.ignore_patterns("global_step*"))
        shutil.copy(written / f"{name}.out", tmp_path / f"{to or name}.out")
        change(folder, **{"host": "elsewhere", **fields})
        return folder

    return copy
