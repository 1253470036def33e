"""What changed where a run has been is refused before any rank starts, without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.cluster.launch import place
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.plan.preflight import check_before_launch
from tests.training.runs import KEYS, corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

ENV = {"DS_ACCELERATOR": "cpu"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The keys of a run that has taken 4 steps from two of three sources."""
    folder = tmp_path_factory.mktemp("past")
    keys = {
        **KEYS,
        **Layout().keys(),
        "train_data_paths": [corpus(folder / name, seed) for seed, name in enumerate(("web", "code", "math"))],
        "train_data_weights": [2, 1, 0],
        "train_iters": 4,
        "save": str(folder / "save"),
    }
    assert run(keys)[0].exit_code == 0
    return keys


def checked(path: Path, keys: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump({**keys, "train_iters": 8, "override_lr_scheduler": True}))
    args = NeoXArgs.from_files([str(path)])
    check_before_launch(args, place(args, ENV, default_hostfile="/no such file"), "train.py")


def test_other_weights_for_the_past(done: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train_data_weights: .*:\n  steps 0 to 3: .*\n.*from 4 on"):
        checked(tmp_path / "run.yml", {**done, "train_data_weights": [1, 1, 0]})


def test_a_source_that_was_read_is_gone(done: dict[str, Any], tmp_path: Path) -> None:
    keys = {**done, "train_data_paths": done["train_data_paths"][::2], "train_data_weights": [2, 1]}
    with pytest.raises(UserError, match=" 2 sources"):
        checked(tmp_path / "run.yml", keys)


def test_another_future_is_accepted(done: dict[str, Any], tmp_path: Path) -> None:
    checked(tmp_path / "run.yml", {**done, "train_data_weights": [[0, [2, 1, 0]], [4, [1, 1, 1]]]})
    checked(tmp_path / "run.yml", {**done, "train_data_weights": [1, 1, 0], "save": str(tmp_path / "new")})


def test_the_command_says_it_without_torch(done: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text(
        yaml.safe_dump({**done, "train_iters": 8, "override_lr_scheduler": True, "train_data_weights": [1, 1, 0]})
    )
    program = (
        f"import sys; sys.argv = ['deepy.py', 'train.py', {str(path)!r}]\n"
        "import deepy\n"
        "try: deepy.main()\n"
        "finally: print('heavy:', sorted({'torch', 'deepspeed'} & set(sys.modules)))\n"
    )
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "heavy: []\n"
    assert re.search(r"^megatron\.errors\.UserError: .*train_data_weights: ", ended.stderr, re.MULTILINE), ended.stderr
