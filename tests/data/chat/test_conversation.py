"""The shapes that chats come in, and what is said of those that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.data.chat.columns import Columns, recognise
from megatron.data.chat.conversation import BadChat, conversation, join_prompt, map_content
from tests.data.chat.chats import say

pytestmark = pytest.mark.cpu

TWO = say(("user", "a"), ("assistant", "b"))
TOOLS = [{"type": "function", "function": {"name": "f", "strict": None}}]


@pytest.mark.parametrize(
    "value",
    [
        TWO,
        tuple(TWO),
        json.dumps(TWO),
        {"messages": TWO},
        [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 1}],
        [{**message, "tool_calls": None, "name": None} for message in TWO],
    ],
)
def test_shapes_of_a_chat(value: Any) -> None:
    assert conversation(value).messages == TWO


@pytest.mark.parametrize("value", [None, [], "[]", {"messages": []}])
def test_nothing(value: Any) -> None:
    assert conversation(value).messages == []


def test_sharegpt_with_tools() -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    value = [
        {"from": "system", "value": "s"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "2"},
    ]
    assert conversation(value).messages == [
        {"role": "system", "content": "s"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "2"},
    ]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools(tools: Any) -> None:
    expected = [{"type": "function", "function": {"name": "f"}}]
    assert conversation(TWO, tools).tools == expected
    assert conversation({"messages": TWO, "tools": tools}).tools == expected
    assert conversation(TWO, []).tools is None


def test_arguments_that_are_json_text() -> None:
    def calling(arguments: Any) -> list[dict[str, Any]]:
        bare = {"name": "f", "arguments": arguments}
        return [{"role": "assistant", "tool_calls": [{"type": "function", "function": bare}, bare]}]

    assert conversation(calling('{"x": 1}')).messages == calling('{"x": 1}')
    assert conversation(calling('{"x": 1}'), parse_arguments=True).messages == calling({"x": 1})
    with pytest.raises(BadChat, match="message 1: arguments .*JSON"):
        conversation(calling("{"), parse_arguments=True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("some text", "list.*text.*--prompt-key"),
        (3, "list.*int"),
        ([3], "message 1: .*int"),
        ([{"content": "a"}], "message 1: .*role.*content"),
        ([TWO[0], {"role": "assistant"}], r"message 2 \(assistant\): .*content"),
        ([{"role": "user", "content": 3}], "message 1: content .*int"),
        ([{"role": "user", "content": [3]}], "message 1: .*part.* int"),
        ([{"from": "human"}], "message 1: .*`from`.*`value`"),
        ([{"from": "function_call", "value": "f()"}], "message 1: .*function_call.*JSON"),
        ("[{", "JSON"),
    ],
)
def test_unusable_chats(value: Any, message: str) -> None:
    with pytest.raises(BadChat, match=message):
        conversation(value)


@pytest.mark.parametrize(("tools", "message"), [("{", "JSON"), ({"a": 1}, "list"), ([1], "list")])
def test_unusable_tools(tools: Any, message: str) -> None:
    with pytest.raises(BadChat, match=f"tools .*{message}"):
        conversation(TWO, tools)


@pytest.mark.parametrize("prompt", ["a", TWO[:1], json.dumps(TWO[:1])])
@pytest.mark.parametrize("completion", ["b", TWO[1:], TWO])
def test_prompt_and_completion(prompt: Any, completion: Any) -> None:
    found = join_prompt(prompt, completion)
    assert found.messages == TWO
    assert found.prompt == 1


def test_a_completion_that_repeats_the_prompt_with_a_system_text() -> None:
    found = join_prompt("a", say(("system", "s")) + TWO)
    assert found.messages == say(("system", "s")) + TWO
    assert found.prompt == 2
    # And one that only continues it.
    assert join_prompt(say(("system", "s")), TWO).messages == say(("system", "s")) + TWO


def test_without_prompt() -> None:
    found = join_prompt(None, TWO)
    assert (found.messages, found.prompt) == (TWO, 0)


def test_a_text_that_looks_like_a_list_is_a_text() -> None:
    assert join_prompt("[{ is how it begins", "[1, 2]").messages == say(
        ("user", "[{ is how it begins"), ("assistant", "[1, 2]")
    )


def test_content_is_changed_and_nothing_else() -> None:
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "x"}, "x"],
        "reasoning_content": "x",
        "tool_calls": [{"name": "x"}],
    }
    changed = map_content(conversation([message]), lambda text: text + "!").messages[0]
    expected = {**message, "content": [{"type": "text", "text": "x!"}, "x!"], "reasoning_content": "x!"}
    assert changed == expected


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"conversation": [], "messages": []}, Columns(("conversation",))),
        ({"prompt": "", "messages": []}, Columns(("messages",))),
        ({"conversations": []}, Columns(("conversations",))),
        ({"prompt": "", "completion": ""}, Columns((), "prompt", "completion")),
        ({"instruction": "", "output": ""}, Columns((), "instruction", "output")),
        ({"prompt": "", "chosen": "", "rejected": ""}, Columns((), "prompt", None, "chosen", "rejected")),
        ({"chosen": [], "rejected": [], "messages": []}, Columns((), None, None, "chosen", "rejected")),
        ({"text": "", "prompt": ""}, None),
    ],
)
def test_columns_are_recognised(record: dict[str, Any], expected: Columns | None) -> None:
    assert recognise(record) == expected
