"""A run that stopped half way, for those who type commands after it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.faults.advice import Typist
from tests.training.runs import KEYS, corpus, run
from tests.training.tiny import Layout


@pytest.fixture
def typist(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], started: Path, tmp_path: Path) -> Typist:
    shutil.copytree(started, tmp_path / "run")
    return Typist(tmp_path / "run", monkeypatch, capfd)


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run.yml`, and in `ckpt` the checkpoints of steps 1 to 3 of its 6."""
    folder = tmp_path_factory.mktemp("started")
    data = corpus(folder / "data")
    keys = {**KEYS, "checkpoint_factor": 1, "lr_decay_style": "cosine", "min_lr": 1e-5}
    (folder / "run.yml").write_text(yaml.safe_dump({**keys, "data_path": "data/text_document", "save": "ckpt"}))
    (report,) = run({**keys, "data_path": data, "save": str(folder / "ckpt"), "exit_interval": 3}, Layout())
    assert report.exit_code == 0, report.error
    return folder
