"""Chats through `prepare_hf_dataset`: their labels are those that `transformers` gives, whatever they are stored in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.hub.pipeline import PrepareOptions, prepare_hf_dataset
from megatron.data.hub.records import Request
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError
from tests.tokenizer.vocabularies import byte_level, write_json

pytestmark = pytest.mark.cpu

SPECIAL = ("<|endoftext|>", "<|padding|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
# With the tags by which transformers itself finds what the assistant says; every turn ends with the eos.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}{% endif %}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
CHATS = [
    [turn("user", "hello"), turn("assistant", "hello world")],
    [
        turn("system", "be brief"),
        turn("user", "I'll"),
        turn("assistant", "é 中"),
        turn("user", "x"),
        turn("assistant", ""),
    ],
    [turn("user", "add"), turn("assistant", "", tool_calls=[CALL])],
    [turn("user", "hell"), turn("assistant", "  world\n")],
]
ROWS = [{"id": i, "messages": chat} for i, chat in enumerate(CHATS)]
Prepare = Callable[..., dict[str, Any]]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    return write_json(tmp_path / "tokenizer" / "tokenizer.json", byte_level(SPECIAL), tokenizer_config=config).parent


@pytest.fixture
def prepare(tmp_path: Path, tokenizer: Path) -> Prepare:
    def run(dataset: Path, **flags: Any) -> dict[str, Any]:
        options = PrepareOptions(Request(str(dataset)), tmp_path / "out", hf_tokenizer=str(tokenizer))
        return prepare_hf_dataset(replace(options, **flags))

    return run


def write(kind: str, folder: Path) -> Path:
    path = folder / f"chats{kind}"
    if kind == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        import datasets

        table = datasets.Dataset.from_list(ROWS)
        # Otherwise this shows nothing of what a column store does to turns.
        assert table[0]["messages"][0].get("tool_calls", "absent") is None
        table.to_parquet(path) if kind == ".parquet" else table.save_to_disk(path)
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".parquet", " saved"])
def test_tokens_and_labels_are_those_of_transformers(
    kind: str, tmp_path: Path, tokenizer: Path, prepare: Prepare
) -> None:
    from transformers import AutoTokenizer

    results = prepare(write(kind, tmp_path))
    reference = AutoTokenizer.from_pretrained(str(tokenizer))
    wanted = [
        reference.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        for chat in CHATS
    ]
    data, labels = IndexedDataset(results["data_path"]), IndexedDataset(results["label_data_path"])
    assert results["data_path"] == str(tmp_path / "out" / "out_messages_document")
    assert results["label_data_path"] == str(tmp_path / "out" / "out_messages_label_document")
    assert len(data) == len(labels) == len(CHATS)
    for i, chat in enumerate(wanted):
        assert data.get(i).tolist() == chat["input_ids"]
        mask = np.array(chat["assistant_masks"], dtype=bool)
        assert labels.get(i).tolist() == np.where(mask, chat["input_ids"], -100).tolist()
    assert results["token_count"] == sum(len(chat["input_ids"]) for chat in wanted)
    assert results["trained_tokens"] == sum(sum(chat["assistant_masks"]) for chat in wanted) > 0


def test_the_export_holds_the_chats(tmp_path: Path, prepare: Prepare) -> None:
    results = prepare(write(".parquet", tmp_path))
    lines = (tmp_path / "out" / "dataset.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"messages": chat} for chat in CHATS]
    assert results["is_messages"] is True
    assert results["text_column"] == "messages"


def test_flattened_chats_have_no_labels(tmp_path: Path, prepare: Prepare) -> None:
    path = write(".jsonl", tmp_path)
    for flag, first in (
        ("midtrain_chat_messages", "hello\n\nhello world"),
        ("skip_chat_template", str(CHATS[0])),
    ):
        results = prepare(path, **{flag: True})
        lines = (tmp_path / "out" / "dataset.jsonl").read_text("utf-8").splitlines()
        assert json.loads(lines[0]) == {"text": first}
        assert results["data_path"].endswith("out_text_document")
        assert "label_data_path" not in results


def test_another_template_makes_other_tokens(tmp_path: Path, prepare: Prepare) -> None:
    """And the stages after the export are done anew."""
    path = write(".jsonl", tmp_path)
    first = prepare(path)["token_count"]
    other = tmp_path / "other.jinja"
    other.write_text(TEMPLATE.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>\n"))
    turns = sum(map(len, CHATS))
    results = prepare(path, chat_template=str(other))
    assert results["token_count"] == results["tokens_written"] == first + turns


def test_chats_without_an_answer_are_left_out(tmp_path: Path, prepare: Prepare) -> None:
    path = tmp_path / "a.jsonl"
    rows = [*ROWS, {"messages": [turn("user", "hello")]}, {"messages": []}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = prepare(path)
    assert len(IndexedDataset(results["data_path"])) == len(CHATS)


def test_a_missing_template_is_an_error_before_anything_is_written(
    tmp_path: Path, tokenizer: Path, prepare: Prepare
) -> None:
    (tokenizer / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=rf"{tokenizer} .*chat_template\.jinja.*--chat-template FILE"):
        prepare(write(".jsonl", tmp_path), skip_count=True)
    assert not (tmp_path / "out").exists()
