"""What is published of a run's files holds no secret, no user and no path of the machine."""

from __future__ import annotations

import pytest
import yaml

from megatron.hub.private import share_text, share_value, share_yaml

pytestmark = pytest.mark.cpu

WANDB_KEY, NEW_WANDB_KEY = "0123456789" * 4, "aB3" * 28 + "xy"
COMMIT = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("/home/you/data/pile_text_document", "pile_text_document"),
        ("--data=/scratch/bob/x.json, then", "--data=x.json, then"),
        ("~/tokenizers/pile.json", "pile.json"),
        ("file:///home/you/x.json", "x.json"),
        ("bob@login.site.org:/home/you/x", "(removed):x"),
        ("https://bob:" + "secret@host/a", "https://***@host/a"),
        (f"key {WANDB_KEY}", "key (removed)"),
        (f"key {NEW_WANDB_KEY}", "key (removed)"),
        ("hf_" + "aB3" * 11, "***"),
        ("AKIA" + "0123456789ABCDEF", "***"),
        ("ghp_" + "aB3" * 12, "***"),
        ("github_pat_" + "aB3" * 12, "***"),
        ("glpat-" + "aB3" * 8, "***"),
        ("sk-proj-" + "aB3" * 12, "***"),
        ("xoxb-" + "1234567890-aB3", "***"),
        # what stays as it is
        ("https://host/home/x and s3://bucket/a", "https://host/home/x and s3://bucket/a"),
        ("${CONFIG_DIR}/tokenizer/t.json", "${CONFIG_DIR}/tokenizer/t.json"),
        ("3/4 of a / b, and/or ~ 5", "3/4 of a / b, and/or ~ 5"),
        ("data/stdlib_text_document", "data/stdlib_text_document"),
    ],
)
def test_paths_are_shortened_and_secrets_removed(text, shared):
    assert share_text(text) == shared


def test_keys_that_hold_secrets_or_name_the_machine():
    config = {
        "wandb_api_key": "short",
        "env": {"HF_TOKEN": "q", "aws_secret_access_key": "r", "NOTE": "/home/you/n"},
        "hostfile": "/home/you/hosts",
        "account": "bob",
        "wandb_team": "bobs",
        "git_hash": COMMIT,
        "vocab_file": "../bob/tokenizer.json",
        "train_data_paths": ["/data/bob/a_text_document", "bob/b_text_document"],
        "mixture": {"sources": {"a": {"path": "/data/bob/a_text_document", "weight": 0.5}}},
        "eos_token": "</s>",
        "model_tokens": {"config": {"eos_token_id": 0}},
        "lr": 1e-4,
    }
    assert share_value(config) == {
        "wandb_api_key": "(removed)",
        "env": {"HF_TOKEN": "(removed)", "aws_secret_access_key": "(removed)", "NOTE": "n"},
        "git_hash": COMMIT,
        "vocab_file": "tokenizer.json",
        "train_data_paths": ["a_text_document", "b_text_document"],
        "mixture": {"sources": {"a": {"path": "a_text_document", "weight": 0.5}}},
        "eos_token": "</s>",
        "model_tokens": {"config": {"eos_token_id": 0}},
        "lr": 1e-4,
    }


def test_a_config_file_loses_comments_and_what_is_private():
    text = f"# of bob, /home/you\n{{ 'num_layers': 2, 'hostfile': '/home/you/h', 'wandb_api_key': '{WANDB_KEY}' }}\n"
    assert yaml.safe_load(share_yaml(text)) == {"num_layers": 2, "wandb_api_key": "(removed)"}
    assert share_yaml("a: [") is None and share_yaml("- a") is None
