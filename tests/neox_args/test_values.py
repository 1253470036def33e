"""Types: what is accepted, and the message for the rest."""

from __future__ import annotations

import re
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
        ("num_layers: four", "num_layers: .*whole number.* 'four'"),
        ("num_layers: 4.5", r"num_layers: .*whole number.* 4\.5"),
        ("num_layers: true", r"num_layers: .*whole number.* true"),
        ("num_layers: [4]", "num_layers: .*whole number.* list of 1"),
        ("lr: fast", "lr: .*a number.* 'fast'"),
        ("lr: .nan", r"lr: .*finite.* nan"),
        ("finetune: 'yes'", "finetune: .*true or false.* 'yes'.*quotes"),
        ("finetune: 1", r"finetune: .*true or false.* 1\b"),
        ("comment: 12", r'comment: .*text.* 12\b.*\("12"\)'),
        ("optimizer: Adam", "optimizer: .*{key: value}.* 'Adam'"),
        (
            "train_data_paths: 'a, b'",
            r"train_data_paths: .* list.* 'a, b'.*\[a, b\]",
        ),
        ("extra_save_iters: [1, x]", "extra_save_iters: .*whole number.* 'x'"),
        ("norm: rmsnrm", "norm: 'rmsnrm' .*: layernorm, "),
        ("norm: rmsnrm", "'rmsnrm'.*'rmsnorm'"),
        (
            "zero_optimization: {stage: one}",
            r"zero_optimization\.stage: .*whole number.* 'one'",
        ),
        ("optimizer: {params: {betas: [0.9]}}", r"optimizer\.params\.betas: .*\b2 values.* list of 1"),
    ],
)
def test_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_text(tmp_path, text + "\n")
    assert re.search(message, str(error.value))
    assert "a.yml:1: " in str(error.value)


def test_a_notebook_shows_what_was_set_and_where(tmp_path: Path) -> None:
    shown = load_text(tmp_path, 'hidden_size: 64\nsave: "a<b"')._repr_html_()
    assert re.findall(r">([^<]+)</t[dh]>", shown) == [
        *("key", "value", "set in"),
        *("hidden_size", "64", f"{tmp_path}/a.yml:1"),
        *("save", "&quot;a&lt;b&quot;", f"{tmp_path}/a.yml:2"),
    ]
