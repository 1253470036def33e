"""The conversations in a record: the shapes that data sets come in, brought to one list of messages.

Known shapes of a column:

| column holds                                            | known as                    |
|---------------------------------------------------------|-----------------------------|
| `[{"role": ..., "content": ...}, ...]`                  | OpenAI, Hugging Face        |
| `[{"from": ..., "value": ...}, ...]`                    | ShareGPT                    |
| `{"messages": [...]}`, with or without `tools`          | the same, one level deeper  |
| two columns, prompt and completion, of text or messages | instruction data            |
| two columns, chosen and rejected, with or without prompt| preference pairs            |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.errors import nearest

# Keys that hold a chat, in the order in which they are looked for. The first is GPT-NeoX's default.
CHAT_KEYS = ("conversation", "messages", "conversations", "chat", "dialogue")
PROMPT_KEYS = ("prompt", "instruction", "question")
COMPLETION_KEYS = ("completion", "response", "output", "answer")
SAID = ("content", "reasoning_content", "reasoning", "thinking")  # keys of a message that hold what is said in it
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}


class BadChat(Exception):
    """A conversation cannot be used; the text says why, for the person who has the data."""


@dataclass(frozen=True)
class Conversation:
    """Messages with `role` and whatever else the template reads (`content`, `tool_calls`, ...), no value None.

    `tools`: JSON schemas of the functions that may be called. `prompt`: so many messages at the start are never
    trained, whatever their role.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    prompt: int = 0


def conversation(value: Any, tools: Any = None, *, parse_arguments: bool = False) -> Conversation:
    """The conversation that a column holds; `messages` is empty when it holds nothing.

    `parse_arguments` turns the arguments of tool calls that are JSON text into what they spell. Raises `BadChat`.
    """
    if isinstance(value, Mapping) and "messages" in value:
        tools = value.get("tools") if tools is None else tools
        value = value["messages"]
    messages = [_message(message, i) for i, message in enumerate(_list(value, "a list of messages"))]
    if parse_arguments:
        messages = [_with_parsed_arguments(message, i) for i, message in enumerate(messages)]
    return Conversation(messages, _tools(tools))


def with_prompt(prompt: Any, completion: Any, tools: Any = None, *, parse_arguments: bool = False) -> Conversation:
    """The conversation of a prompt (text of the user, or messages) and its completion (text or messages).

    A completion that repeats the prompt's last message is taken as the whole conversation. Raises `BadChat`.
    """
    before = conversation(_spoken(prompt, "user"), tools, parse_arguments=parse_arguments)
    after = conversation(_spoken(completion, "assistant"), tools, parse_arguments=parse_arguments)
    repeated = _repeated(before.messages, after.messages)
    if repeated:
        return Conversation(after.messages, after.tools, repeated)
    return Conversation([*before.messages, *after.messages], after.tools, len(before.messages))


def _repeated(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> int:
    """How many messages at the start of a completion repeat its prompt: up to where the prompt's last one stands."""
    if not before:
        return 0
    last = (before[-1]["role"], before[-1].get("content"))
    return next((i + 1 for i, m in enumerate(after) if (m["role"], m.get("content")) == last), 0)


def common_start(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two lists have in common at their start."""
    pairs = zip(one, other)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def chat_key(record: Mapping[str, Any]) -> str | None:
    """The key of a record that holds a chat, None when there is none of the usual names."""
    return next((key for key in CHAT_KEYS if key in record), None)


def prompt_keys(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """The keys of a record that hold a prompt and its completion, None when it has no such pair."""
    prompt = next((key for key in PROMPT_KEYS if key in record), None)
    completion = next((key for key in COMPLETION_KEYS if key in record), None)
    return (prompt, completion) if prompt and completion else None


def column(record: Mapping[str, Any], key: str) -> Any:
    """`record[key]`. Raises `BadChat` naming the keys there are."""
    if key not in record:
        raise BadChat(f"no key {key!r}.{nearest(key, list(record))} The record has: {', '.join(record)}")
    return record[key]


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` (nested lists and objects) with every text in it changed; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_text(item, change) for key, item in value.items()}
    return [map_text(item, change) for item in value] if isinstance(value, list | tuple) else value


def map_content(chat: Conversation, change: Callable[[str], str]) -> Conversation:
    """The chat with every text that is said in it (content and reasoning) changed; roles, tools and calls stay."""
    messages = [
        {key: _map_said(value, change) if key in SAID else value for key, value in message.items()}
        for message in chat.messages
    ]
    return replace(chat, messages=messages)


def with_joined_parts(chat: Conversation) -> Conversation:
    """The chat with contents that are lists of text parts made one text each. Raises `BadChat` for other parts."""
    messages = [
        {**message, "content": _joined(message["content"], i)} if isinstance(message.get("content"), list) else message
        for i, message in enumerate(chat.messages)
    ]
    return replace(chat, messages=messages)


def _joined(parts: list[Any], index: int) -> str:
    found = [part.get("text") if isinstance(part, dict) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise BadChat(f"message {index + 1}: a part of its content is no text, and the chat template takes only texts")
    return "".join(texts)


def _map_said(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if not isinstance(value, list):
        return value
    return [
        change(part) if isinstance(part, str) else {k: change(v) if k == "text" else v for k, v in part.items()}
        for part in value
    ]


def _spoken(value: Any, role: str) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) and not _is_json_list(value) else value


def _is_json_list(text: str) -> bool:
    if not text.startswith("[{"):
        return False
    try:
        return isinstance(json.loads(text), list)
    except ValueError:
        return False


def _list(value: Any, what: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadChat(f"expected {what}, found text that is no JSON ({error})") from error
    if isinstance(value, str):
        raise BadChat(
            f"expected {what}, found text. A column of plain text is for preprocess_data.py; a prompt and its "
            "completion are given with --prompt-key and --completion-key"
        )
    if not isinstance(value, list | tuple):
        raise BadChat(f"expected {what}, found {type(value).__name__}")
    return list(value)


def _message(message: Any, index: int) -> dict[str, Any]:
    """One message without its None values (parquet fills up what other rows have), ShareGPT's renamed."""
    if not isinstance(message, Mapping):
        raise BadChat(f"message {index + 1}: expected an object with role and content, found {type(message).__name__}")
    found = {key: value for key, value in message.items() if value is not None}
    if "role" not in found and "from" in found:
        found = _from_sharegpt(found, index)
    role = found.get("role")
    if not isinstance(role, str) or not role:
        raise BadChat(f"message {index + 1}: no role. It has: {', '.join(message) or 'nothing'}")
    content = found.get("content")
    if isinstance(content, list | tuple):
        found["content"] = [_part(part, index) for part in content]
    elif content is not None and not isinstance(content, str):
        raise BadChat(f"message {index + 1}: content is {type(content).__name__}, neither text nor a list of parts")
    elif content is None and not any(found.get(key) for key in found if key != "role"):
        raise BadChat(f"message {index + 1} ({role}): no content. It has: {', '.join(message)}")
    return found


def _part(part: Any, index: int) -> Any:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise BadChat(f"message {index + 1}: a part of its content is {type(part).__name__}")
    return {key: value for key, value in part.items() if value is not None}


def _from_sharegpt(message: dict[str, Any], index: int) -> dict[str, Any]:
    said, value = str(message["from"]), message.get("value")
    if not isinstance(value, str):
        raise BadChat(f"message {index + 1}: ShareGPT's `from` without a text in `value`")
    rest = {key: value for key, value in message.items() if key not in ("from", "value", "weight")}
    if said == "function_call":
        try:
            call = json.loads(value)
        except ValueError as error:
            raise BadChat(f"message {index + 1}: a function_call that is no JSON ({error})") from error
        calls = call if isinstance(call, list) else [call]
        return {**rest, "role": "assistant", "tool_calls": [{"type": "function", "function": c} for c in calls]}
    return {**rest, "role": SHAREGPT_ROLES.get(said, said), "content": value}


def _tools(tools: Any) -> list[Any] | None:
    if not tools:
        return None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadChat(f"tools are text that is no JSON ({error})") from error
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadChat("tools are not a list of JSON schemas")
    return [_without_none(tool) for tool in tools] or None


def _without_none(value: Any) -> Any:
    """Without the None that parquet puts where another row's schema has a field."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


def _with_parsed_arguments(message: dict[str, Any], index: int) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in _list(message["tool_calls"], "a list of tool calls"):
        if not isinstance(call, Mapping):
            raise BadChat(f"message {index + 1}: a tool call is {type(call).__name__}, not an object")
        function = call.get("function")
        inner = dict(function) if isinstance(function, Mapping) else dict(call)
        if isinstance(inner.get("arguments"), str):
            try:
                inner["arguments"] = json.loads(inner["arguments"])
            except ValueError as error:
                raise BadChat(f"message {index + 1}: arguments of a tool call are no JSON ({error})") from error
        calls.append({**call, "function": inner} if isinstance(function, Mapping) else inner)
    return {**message, "tool_calls": calls}
