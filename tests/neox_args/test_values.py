"""Types: what is accepted, and the message for the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import UserError
from tests.neox_args.helpers import load_text

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("lr: 1e-4", "lr", 1e-4),  # YAML reads it as text
        ("lr: '1e-4'", "lr", 1e-4),
        ("lr: 1", "lr", 1.0),
        ("train_iters: 10.0", "train_iters", 10),
        ("train_iters: 1e5", "train_iters", 100000),
        ("norm: RMSNorm", "norm", "rmsnorm"),
        ("precision: BF16", "precision", "bfloat16"),
        ("checkpoint_factor: 2", "checkpoint_factor", 2),
        ("checkpoint_factor: 1.5", "checkpoint_factor", 1.5),
        ("num_kv_heads: null", "num_kv_heads", None),
        ("num_kv_heads: None", "num_kv_heads", None),
        ("pos_emb: None", "pos_emb", "none"),
        ("hidden_dropout: null", "hidden_dropout", 0.0),
        ("eval_tasks: lambada", "eval_tasks", ("lambada",)),
        ("train_data_weights: [1, 2.5]", "train_data_weights", (1.0, 2.5)),
        ("optimizer: {params: {lr: 1e-3}}", "optimizer", {"params": {"lr": 1e-3}}),
        ("tokenizer_type: hftokenizer", "tokenizer_type", "HFTokenizer"),
    ],
)
def test_accepted(text: str, key: str, value: object, tmp_path: Path) -> None:
    got = load_text(tmp_path, text + "\n").get(key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_layers: four", "num_layers: the text 'four' was given, a whole number is wanted"),
        ("num_layers: 4.5", "num_layers: the number 4.5 was given, a whole number is wanted"),
        ("num_layers: true", "num_layers: the truth value true was given, a whole number is wanted"),
        ("num_layers: [4]", "num_layers: a list of 1 was given, a whole number is wanted"),
        ("lr: fast", "lr: the text 'fast' was given, a number is wanted"),
        ("lr: .nan", "lr: the number nan was given, a finite number is wanted"),
        ("finetune: 'yes'", "finetune: the text 'yes' was given, true or false is wanted: write it without quotes"),
        ("finetune: 1", "finetune: the number 1 was given, true or false is wanted: write it without quotes"),
        ("comment: 12", 'comment: the number 12 was given, text is wanted: put quotes around it ("12")'),
        ("optimizer: Adam", "optimizer: the text 'Adam' was given, a mapping {key: value} is wanted"),
        (
            "train_data_paths: 'a, b'",
            "train_data_paths: the text 'a, b' was given, a list is wanted: did you mean [a, b]?",
        ),
        ("extra_save_iters: [1, x]", "extra_save_iters: the text 'x' was given, a whole number is wanted"),
        ("norm: rmsnrm", "norm: 'rmsnrm' is not one of: layernorm, "),
        ("norm: rmsnrm", "Did you mean 'rmsnorm'?"),
        (
            "zero_optimization: {stage: one}",
            "zero_optimization.stage: the text 'one' was given, a whole number is wanted",
        ),
        ("optimizer: {params: {betas: [0.9]}}", "optimizer.params.betas: a list of 1 was given, 2 values are wanted"),
    ],
)
def test_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_text(tmp_path, text + "\n")
    assert message in str(error.value)
    assert "a.yml:1: " in str(error.value)
