"""What is said of post-training before it starts: its files by key and line, its reference, its completions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron.errors import UserError
from tests.data.corpus import write
from tests.plan.test_planner import dry_run

pytestmark = pytest.mark.cpu

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "train_batch_size": 4,
    "train_iters": 10,
    "eval_iters": 0,
    "tokenizer_type": "CharLevelTokenizer",
    "pack_impl": "unpacked",
}
TEXTS = [[1, 2, 3, 4, 5]] * 30
LABELS = [[-100, -100, 3, 4, 5]] * 30


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """`config(**keys)` -> a run on `texts`, `other`, `labels` and `rewards` of its folder, with these keys behind
    those of the model."""
    for name, items, dtype in (
        ("texts", TEXTS, np.uint16),
        ("other", TEXTS, np.uint16),
        ("labels", LABELS, np.int32),
        ("rewards", [[1]] * 30, np.float32),
    ):
        write(tmp_path / name, items, dtype)

    def make(**keys: Any) -> Path:
        path = tmp_path / "run.yml"
        path.write_text(yaml.safe_dump({**MODEL, "data_root": str(tmp_path), **keys}, sort_keys=False))
        return path

    return make


def line_of(path: Path, key: str) -> str:
    lines = path.read_text().splitlines()
    return f"{path}:{next(n for n, line in enumerate(lines, 1) if line.startswith(f'{key}:'))}: {key}: "


PAIRS = {
    "train_impl": "dpo",
    "dataset_impl": "pairwise",
    "pos_train_data_paths": ["texts"],
    "neg_train_data_paths": ["other"],
}
KTO = {
    "train_impl": "kto",
    "train_data_paths": ["texts"],
    "train_label_data_paths": ["labels"],
    "train_reward_data_paths": ["rewards"],
}
CHAT_TOOL = "preprocess_data_with_chat_template.py"


@pytest.mark.parametrize(
    ("keys", "wrong", "remedy"),
    [
        ({**PAIRS, "pos_train_data_paths": ["none"]}, "pos_train_data_paths", CHAT_TOOL),
        ({**PAIRS, "neg_train_data_paths": ["none"]}, "neg_train_data_paths", CHAT_TOOL),
        ({**KTO, "train_data_paths": ["none"]}, "train_data_paths", "preprocess_data.py"),
        ({**KTO, "train_label_data_paths": ["none"]}, "train_label_data_paths", CHAT_TOOL),
        ({**KTO, "train_reward_data_paths": ["none"]}, "train_reward_data_paths", CHAT_TOOL),
        (
            {**KTO, "kto_loss_type": "apo_zero_unpaired", "precompute_model_name": "none"},
            "precompute_model_name",
            "Without precompute_model_name the run computes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_missing_file_is_named_by_the_key_and_line_that_the_user_wrote(
    config: Callable[..., Path], keys: dict[str, Any], wrong: str, remedy: str
) -> None:
    path = config(**keys)
    with pytest.raises(UserError) as caught:
        dry_run(path)
    assert str(caught.value).startswith(f"{line_of(path, wrong)}no dataset ") and "none" in str(caught.value)
    assert remedy in str(caught.value) and "things are wrong" not in str(caught.value)


def test_pairs_speak_of_the_keys_of_their_sides(
    config: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "side_chosen_document", TEXTS, np.uint16)
    write(tmp_path / "side_chosen_label_document", LABELS, np.int32)
    dry_run(config(**{**PAIRS, "pos_train_data_paths": ["side_chosen_document"]}))
    assert "add them to pos_train_label_data_paths and neg_train_label_data_paths" in caplog.text
    with pytest.raises(UserError, match="2 weights for 1 pos_train_data_paths"):
        dry_run(config(**PAIRS, train_data_weights=[1, 2]))
    valid = {name.replace("train", "valid"): paths for name, paths in PAIRS.items() if name.endswith("paths")}
    rest = {name: value for name, value in PAIRS.items() if not name.endswith("paths")}
    with pytest.raises(UserError, match="pos_valid_data_paths: is set without pos_train_data_paths"):
        dry_run(config(**rest, **valid))
