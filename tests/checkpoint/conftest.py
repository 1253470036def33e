"""Folders of checkpoints without tensors, for tests of what is found in them."""

from pathlib import Path

import pytest

from tests.checkpoint.starts import put


@pytest.fixture
def save(tmp_path: Path) -> Path:
    return tmp_path / "save"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    put(tmp_path / "base", 2)
    put(tmp_path / "base", 4)
    return tmp_path / "base"
