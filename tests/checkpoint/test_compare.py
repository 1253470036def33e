"""Configuration changes since a checkpoint: which are refused, which are said."""

import re

import pytest

from megatron.checkpoint.compare import check_config, compare_configs
from megatron.errors import UserError

pytestmark = pytest.mark.cpu

SAVED = {
    "hidden_size": 16,
    "attention_config": ["global", "global"],
    "tokenizer_type": "HFTokenizer",
    "data_path": "a",
    "lr": 1e-3,
    "train_batch_size": 8,
    "optimizer_type": "adam",
    "iteration": None,
}


def test_tuples_and_lists_are_the_same_and_new_keys_are_no_change():
    now = {**SAVED, "attention_config": ("global", "global"), "added_later": 3, "iteration": 4}
    assert compare_configs(SAVED, now) == ([], [])


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("hidden_size", 32, "architecture"),
        ("tokenizer_type", "CharLevelTokenizer", "tokenizer"),
        ("data_path", "b", "data order"),
        ("optimizer_type", "sgd", "optimizer"),
    ],
)
def test_breaking_changes_are_refused_unless_allowed(key, value, kind):
    now = {**SAVED, key: value}
    with pytest.raises(UserError, match=rf"{kind}: {key}: .*now.*\n.*allow_config_changes"):
        check_config(SAVED, now)
    assert "allow_config_changes" in check_config(SAVED, now, allow=True)[0]


def test_other_changes_are_listed():
    messages = check_config(SAVED, {**SAVED, "lr": 2e-3, "train_batch_size": 16})
    assert len(messages) == 2
    assert re.search(r"\blr: 0\.001 .*now 0\.002$", messages[0])
    assert re.search(r"\btrain_batch_size: 8 .*now 16$", messages[1])


def test_finetuning_takes_new_data_and_optimizer_but_not_another_architecture():
    now = {**SAVED, "data_path": "b", "optimizer_type": "sgd"}
    assert len(check_config(SAVED, now, finetune=True)) == 2
    with pytest.raises(UserError, match="architecture: hidden_size"):
        check_config(SAVED, {**now, "hidden_size": 8}, finetune=True)


def test_a_new_optimizer_without_its_old_state():
    assert check_config(SAVED, {**SAVED, "optimizer_type": "sgd"}, load_optim=False)
