"""Tokens, and labels where the template has tags, are those of `AutoTokenizer.apply_chat_template`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data.chat.encoder import ChatEncoder, ChatOptions
from megatron.data.chat.template import load_template
from tests.data.chat.chats import THOUGHTS, THREE, Message, documents, encoder, rows, say
from tests.data.chat.templates import CHATML, TAGGED, TEMPLATES, write_folder

pytestmark = pytest.mark.cpu

TOOLS = [{"type": "function", "function": {"name": "wetter", "description": "ü <b>", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "wetter", "arguments": {"city": "Zürich"}}}
CHATS = {
    "three": THREE,
    "thoughts": THOUGHTS,
    "system": say(("system", "Be kind.")) + THREE[:2],
    "open": THREE[:3],
    "blank": say(("user", "  x\n"), ("assistant", "\n y  ")),
    "special": say(("user", "a<|im_end|>\n<s>b"), ("assistant", "c</s>d <|head|>")),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[ChatEncoder, Any]]:
    """For the name of a template: our encoder, and the tokenizer of `transformers`; both over the same folder."""
    from transformers import AutoTokenizer

    root, kept = tmp_path_factory.mktemp("tokenizers"), dict[str, tuple[ChatEncoder, Any]]()

    def get(name: str) -> tuple[ChatEncoder, Any]:
        if name not in kept:
            folder = root / name.replace(" ", "_")
            kept[name] = encoder(folder, name), AutoTokenizer.from_pretrained(str(folder))
        return kept[name]

    return get


def tokens_of(ours: ChatEncoder, messages: list[Message], **more: Any) -> tuple[list[int], list[int]]:
    encoded = ours.encode(rows({"messages": messages, **more}))
    return documents(encoded, 0)[0], documents(encoded, 1)[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_are_those_of_transformers(name: str, made: Callable[[str], tuple[ChatEncoder, Any]]) -> None:
    ours, theirs = made(name)
    for messages in CHATS.values():
        expected = theirs.apply_chat_template(messages, return_dict=False)
        tokens, labels = tokens_of(ours, messages)
        assert len(tokens) == len(labels)
        assert tokens[: len(expected)] == expected
        # One eos is added, where the chat does not end with it already.
        text = theirs.decode(expected).rstrip()
        added = [] if text.endswith(theirs.eos_token) else [theirs.eos_token_id]
        assert tokens[len(expected) :] == added


def test_tools_and_calls(made: Callable[[str], tuple[ChatEncoder, Any]]) -> None:
    ours, theirs = made("tools")
    messages = [*THREE[:1], {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "20"}, *THREE[1:2]]
    expected = theirs.apply_chat_template(messages, tools=TOOLS, return_dict=False)
    assert tokens_of(ours, messages, tools=TOOLS)[0] == expected
    # Files of columns fill missing keys with None; `transformers` leaves such keys out as well.
    filled = [{"content": None, "tool_calls": None, **message} for message in messages]
    assert theirs.apply_chat_template(filled, tools=TOOLS, return_dict=False) == expected
    assert tokens_of(ours, filled, tools=TOOLS)[0] == expected


def test_variables_of_the_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = "{{ date }}{{ strftime_now('%Y') }}{{ {'a': '<é>'} | tojson }}" + CHATML
    folder = write_folder(tmp_path / "t", "chatml", chat_template=source)
    template = load_template(folder, extra={"date": "today"})
    from tests.data.chat.chats import chat

    expected = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(THREE, tokenize=False, date="today")
    assert template.render(chat(THREE)) == expected


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_labels_of_tags_are_the_assistant_mask(
    messages: list[Message], made: Callable[[str], tuple[ChatEncoder, Any]]
) -> None:
    ours, theirs = made("tagged")
    expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    tokens, labels = tokens_of(ours, messages)
    assert [label >= 0 for label in labels] == [mask == 1 for mask in expected["assistant_masks"]]
    assert tokens == expected["input_ids"]


WORDS = st.sampled_from(["hello", " world", "\n", " ", "  ", "é", "🤖", "<|im_end|>", "assistant\n", ".", "\t"])
CONTENT = st.lists(WORDS, max_size=8).map("".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), CONTENT), min_size=1, max_size=5))
def test_derived_labels_are_those_of_the_same_template_with_tags(
    made: Callable[[str], tuple[ChatEncoder, Any]], turns: list[tuple[str, str]]
) -> None:
    """TAGGED writes the same text as CHATML, and says itself what the model's part is."""
    messages = say(*turns)
    ours, theirs = made("chatml")
    expected = theirs.apply_chat_template(
        messages, chat_template=TAGGED, return_dict=True, return_assistant_tokens_mask=True
    )
    if not any(expected["assistant_masks"]):
        assert ours.encode(rows({"messages": messages})).tally.documents == [0, 0]
        return
    tokens, labels = tokens_of(ours, messages)
    assert tokens[: len(expected["input_ids"])] == expected["input_ids"]
    assert [label >= 0 for label in labels][: len(tokens)] == [mask == 1 for mask in expected["assistant_masks"]]


def test_a_template_in_a_file_of_its_own_and_named_ones(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / "t", "chatml")
    (folder / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert load_template(folder).source == AutoTokenizer.from_pretrained(str(folder)).chat_template
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools {{ messages[0].content }}")
    ours, theirs = load_template(folder), AutoTokenizer.from_pretrained(str(folder))
    from tests.data.chat.chats import chat

    for tools in (None, TOOLS):
        assert ours.render(chat(THREE, tools)) == theirs.apply_chat_template(THREE, tools=tools, tokenize=False)
    assert load_template(folder, "tool_use").render(chat(THREE)) == "tools Hi there"


def test_a_token_that_only_the_class_knows(tmp_path: Path) -> None:
    """GPT-2's class has an end-of-sequence token of its own, which its files need not name."""
    import json

    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / "t", "instruct")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"}))
    theirs = AutoTokenizer.from_pretrained(str(folder))
    assert theirs.eos_token == "<|endoftext|>"
    assert load_template(folder).tokens["eos_token"] == "<|endoftext|>"


def test_options_do_not_change_the_tokens(tmp_path: Path) -> None:
    plain = tokens_of(encoder(tmp_path / "t", "chatml"), THREE)[0]
    for options in (ChatOptions(only_last=True), ChatOptions(no_mask=True), ChatOptions(roles=("user",))):
        assert tokens_of(encoder(tmp_path / "t", "chatml", options), THREE)[0] == plain
