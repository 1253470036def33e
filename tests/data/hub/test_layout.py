"""Which column is taken, and what a record becomes."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.data.chat.conversation import without_nulls
from megatron.data.hub.layout import Layout, Unusable, detect
from megatron.errors import UserError

pytestmark = pytest.mark.cpu

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
BOTH = {"text": "a", "messages": CHAT, "title": "t"}


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ({}, Layout("text", ("text",))),
        ({"text_column": "messages"}, Layout("messages", ("messages",))),
        ({"text_column": "title"}, Layout("text", ("title",))),
        ({"midtrain": True}, Layout("messages", ("messages",), "midtrain")),
        ({"midtrain": True, "skip_template": True}, Layout("messages", ("messages",), "midtrain")),
        ({"text_column": "messages", "skip_template": True}, Layout("messages", ("messages",), "plain")),
        (
            {"join_columns": ["title", "text"], "text_column": "messages", "midtrain": True},
            Layout("join", ("title", "text")),
        ),
    ],
)
def test_the_order_of_the_flags(flags: dict[str, Any], layout: Layout) -> None:
    """Joined columns before the one named, before midtrain's `messages`, before `text`, before `messages`."""
    assert detect(list(BOTH), [BOTH], **flags) == layout


def test_messages_are_found_without_a_text() -> None:
    assert detect(["id", "messages"], [{"id": 1, "messages": None}, {"id": 2, "messages": CHAT}]) == Layout(
        "messages", ("messages",)
    )


@pytest.mark.parametrize(
    ("record", "flags", "said"),
    [
        (
            {"body": "a", "talk": CHAT},
            {},
            "'text'.*'messages'.*body, talk.*Chats: talk.*Texts: body",
        ),
        ({"text": "a"}, {"text_column": "txt"}, "--text-column: .*'txt'.*'text'"),
        ({"text": "a"}, {"join_columns": ["text", "b"]}, "--join-columns: .*'b'"),
        ({"text": "a"}, {"midtrain": True}, "--midtrain-chat-messages: .*'messages'"),
        (
            {"text": "a"},
            {"midtrain": True, "text_column": "text"},
            "--midtrain-chat-messages: .*'text'",
        ),
        ({"text": 3, "body": "a"}, {}, "column 'text' .*number.* Texts: body"),
    ],
)
def test_impossible_requests_are_refused(record: dict[str, Any], flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        detect(list(record), [record], **flags)


def test_texts() -> None:
    layout = Layout("text", ("body",))
    assert layout.render({"body": " a\n"}) == {"text": " a\n"}
    assert [layout.render({"body": value}) for value in (None, "")] == [None] * 2
    assert layout.render({"body": " \n"}) == {"text": " \n"}  # a document, as in GPT-NeoX
    for value, said in ((3, "holds a number"), ([], "holds a list")):
        with pytest.raises(Unusable, match=said):
            layout.render({"body": value})
    with pytest.raises(Unusable, match="key 'body'.*'bodi'"):
        layout.render({"bodi": "a"})


def test_joined_columns() -> None:
    """A blank line between what is there; 0 and False are values, null and the empty text are none."""
    layout = Layout("join", ("a", "b", "c"))
    assert layout.render({"a": "x", "b": None, "c": "y"}) == {"text": "x\n\ny"}
    assert layout.render({"a": 0, "b": "", "c": ["é"]}) == {"text": '0\n\n["é"]'}
    assert layout.render({"a": None, "b": ""}) is None


def test_chats_stay_chats() -> None:
    layout = Layout("messages", ("messages",))
    assert layout.key == "messages"
    assert layout.render({"messages": CHAT}) == {"messages": CHAT}
    assert layout.render({"messages": []}) is None
    assert layout.render({"messages": None}) is None
    with pytest.raises(Unusable, match="key 'messages'"):
        layout.render({"messages": ["hi"]})


def test_a_column_store_adds_keys_that_no_template_may_see() -> None:
    """Arrow gives every turn, and every call's arguments, the keys of all others with null in them."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1, "city": None}}}
    turns = [
        {"role": "user", "content": "hi", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": None}}]
    line = Layout("messages", ("messages",)).render({"messages": turns, "tools": tools})
    assert line is not None
    assert "tool_calls" not in line["messages"][0]
    assert line["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert line["tools"] == [{"type": "function", "function": {"name": "add"}}]
    assert without_nulls({"a": [None, {"b": None}], "c": False}) == {"a": [None, {}], "c": False}


def test_chats_stored_as_json_text_and_in_share_gpts_words() -> None:
    layout = Layout("messages", ("messages",))
    assert layout.render({"messages": '[{"role": "user", "content": "hi"}]'}) == {"messages": CHAT[:1]}
    said = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    assert layout.render({"messages": said}) == {"messages": CHAT}
    assert detect(["messages"], [{"messages": '[{"role": "user", "content": "hi"}]'}]).kind == "messages"


def test_flattened_chats() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    turns = [*CHAT, {"role": "user", "content": parts}, {"role": "user", "content": ""}]
    midtrain = Layout("messages", ("messages",), "midtrain")
    assert midtrain.key == "text"
    assert midtrain.render({"messages": turns}) == {"text": "hi\n\nhello\n\none two"}
    plain = Layout("messages", ("messages",), "plain")
    assert plain.key == "text"
    assert plain.render({"messages": CHAT}) == {"text": str(CHAT)}
