"""A checkpoint's folder in place of config files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import UserError
from megatron.plan.from_checkpoint import files_or_checkpoint
from megatron.plan.preflight import read_config
from tests.inference.models import GPT_NEOX, make_checkpoint

pytestmark = pytest.mark.cpu

KEYS: dict[str, Any] = {**GPT_NEOX, "tokenizer_type": "CharLevelTokenizer", "vocab_file": None}
KEYS |= {"num_gpus": 4, "hostfile": "/nowhere", "maximum_tokens": 5, "seed": 7}
KEYS |= {"eval_tasks": ["piqa"], "eval_interval": 1000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    keys = {key: value for key, value in KEYS.items() if key not in ("num_gpus", "hostfile")}
    path = make_checkpoint(folder, keys, vocab=512)
    shutil.copytree(path, folder / "global_step2")
    return folder


@pytest.mark.parametrize("name", ["", "global_step1"])
def test_its_network_on_one_rank_and_nothing_else_of_the_job(folder: Path, name: str):
    args = read_config([str(folder / name)], ["maximum_tokens=9", "model_parallel_size=2"], "generate.py")
    assert (args.model.hidden_size, args.model.num_kv_heads, args.training.seed) == (32, 2, 7)
    assert (args.checkpoint.load, args.checkpoint.iteration) == (str(folder), 1)
    assert (args.parallel.model_parallel_size, args.parallel.num_gpus, args.launcher.hostfile) == (2, None, None)
    assert args.generation.maximum_tokens == 9 and args.is_set("maximum_tokens")
    assert args.generation.eval_tasks is None and not args.is_set("temperature")


def test_the_iteration_is_one_s_own(folder: Path):
    with pytest.raises(UserError, match="iteration 3"):
        files_or_checkpoint([str(folder)], ["iteration=3"])
    assert files_or_checkpoint([str(folder)], ["iteration=1"]).checkpoint.iteration == 1


def test_what_holds_no_checkpoint(folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match="no complete checkpoint"):
        files_or_checkpoint([str(tmp_path)], [])
    with pytest.raises(UserError, match="give one checkpoint"):
        files_or_checkpoint([str(folder), str(tmp_path)], [])


def test_a_hugging_face_folder_is_what_load_names(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert files_or_checkpoint([str(tmp_path)], []).checkpoint.load == str(tmp_path)
