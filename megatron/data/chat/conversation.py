"""The conversations in a record, which data sets hold in several shapes, as one list of messages.

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

CONTENT_KEYS = ("content", "reasoning_content", "reasoning", "thinking")  # keys of a message that hold its text
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
    """An unusable conversation; the message says why."""


@dataclass(frozen=True)
class Conversation:
    """Messages with `role` and what else the template reads (`content`, `tool_calls`, ...), no value None.

    `tools`: JSON schemas of the functions that may be called. `prompt`: this many messages at the start are never
    trained, whatever their role.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    prompt: int = 0


def conversation(value: Any, tools: Any = None, *, parse_arguments: bool = False) -> Conversation:
    """The conversation that a column holds; `messages` is empty for an empty column.

    `parse_arguments`: parse the arguments of tool calls that are JSON text. Raises `BadChat`.
    """
    if isinstance(value, Mapping) and "messages" in value:
        tools = value.get("tools") if tools is None else tools
        value = value["messages"]
    messages = [_message(message, i) for i, message in enumerate(_list(value, "a list of messages"))]
    if parse_arguments:
        messages = [_parse_arguments(message, i) for i, message in enumerate(messages)]
    return Conversation(messages, _tools(tools))


def join_prompt(prompt: Any, completion: Any, tools: Any = None, *, parse_arguments: bool = False) -> Conversation:
    """The conversation of a prompt (text of the user, or messages) and its completion (text or messages).

    A completion that repeats the prompt's last message is taken as the whole conversation. Raises `BadChat`.
    """
    before = conversation(_as_messages(prompt, "user"), tools, parse_arguments=parse_arguments)
    after = conversation(_as_messages(completion, "assistant"), tools, parse_arguments=parse_arguments)
    repeated = _count_repeated(before.messages, after.messages)
    if repeated:
        return Conversation(after.messages, after.tools, repeated)
    return Conversation([*before.messages, *after.messages], after.tools, len(before.messages))


def _count_repeated(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> int:
    """How many messages at the start of a completion repeat its prompt: up to the last message of the prompt."""
    if not before:
        return 0
    last = (before[-1]["role"], before[-1].get("content"))
    return next((i + 1 for i, m in enumerate(after) if (m["role"], m.get("content")) == last), 0)


def common_start(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two lists have in common at their start."""
    pairs = zip(one, other)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def column(record: Mapping[str, Any], key: str) -> Any:
    """`record[key]`. Raises `BadChat` with the record's keys."""
    if key not in record:
        raise BadChat(f"no key {key!r}.{nearest(key, list(record))} The record has: {', '.join(record)}")
    return record[key]


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` (nested lists and objects) with `change` applied to every text; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_text(item, change) for key, item in value.items()}
    return [map_text(item, change) for item in value] if isinstance(value, list | tuple) else value


def map_content(chat: Conversation, change: Callable[[str], str]) -> Conversation:
    """The chat with `change` applied to the text of its messages (content, reasoning); roles, tools and calls stay."""
    messages = [
        {key: _map_content(value, change) if key in CONTENT_KEYS else value for key, value in message.items()}
        for message in chat.messages
    ]
    return replace(chat, messages=messages)


def join_parts(chat: Conversation) -> Conversation:
    """The chat with each list of text parts joined to one text. Raises `BadChat` for other parts."""
    messages = [
        {**message, "content": _join(message["content"], i)} if isinstance(message.get("content"), list) else message
        for i, message in enumerate(chat.messages)
    ]
    return replace(chat, messages=messages)


def _join(parts: list[Any], index: int) -> str:
    found = [part.get("text") if isinstance(part, dict) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise BadChat(f"message {index + 1}: a part of its content is not text, which the chat template needs")
    return "".join(texts)


def _map_content(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if not isinstance(value, list):
        return value
    return [
        change(part) if isinstance(part, str) else {k: change(v) if k == "text" else v for k, v in part.items()}
        for part in value
    ]


def _as_messages(value: Any, role: str) -> Any:
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
            raise BadChat(f"expected {what}, found text that is not valid JSON ({error})") from error
    if isinstance(value, str):
        raise BadChat(
            f"expected {what}, found text. Plain text is for preprocess_data.py; name a prompt and its completion "
            "with --prompt-key and --completion-key"
        )
    if not isinstance(value, list | tuple):
        raise BadChat(f"expected {what}, found {type(value).__name__}")
    return list(value)


def _message(message: Any, index: int) -> dict[str, Any]:
    """One message without None values (parquet adds the keys of other rows), with ShareGPT's keys renamed."""
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
    speaker, value = str(message["from"]), message.get("value")
    if not isinstance(value, str):
        raise BadChat(f"message {index + 1}: ShareGPT's `from` without a text in `value`")
    rest = {key: value for key, value in message.items() if key not in ("from", "value", "weight")}
    if speaker == "function_call":
        try:
            call = json.loads(value)
        except ValueError as error:
            raise BadChat(f"message {index + 1}: a function_call that is not valid JSON ({error})") from error
        calls = call if isinstance(call, list) else [call]
        return {**rest, "role": "assistant", "tool_calls": [{"type": "function", "function": c} for c in calls]}
    return {**rest, "role": SHAREGPT_ROLES.get(speaker, speaker), "content": value}


def _tools(tools: Any) -> list[Any] | None:
    if not tools:
        return None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadChat(f"tools are text that is not valid JSON ({error})") from error
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadChat("tools are not a list of JSON schemas")
    return [without_nulls(tool) for tool in tools] or None


def without_nulls(value: Any) -> Any:
    """`value` without keys of None at any depth: parquet gives every object the keys of all others."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _parse_arguments(message: dict[str, Any], index: int) -> dict[str, Any]:
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
