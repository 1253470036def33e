"""Marks in the messages of a chat, which show where their contents are in its rendering."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.data.chat.conversation import CONTENT_KEYS, Conversation, map_content

# Code points that Unicode reserves for use inside a program; no exchanged text has them.
BEGIN, END, CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
MARK = re.compile(f"([{BEGIN}{END}])(\\d+){CLOSE}")


@dataclass(frozen=True)
class Places:
    """Where the contents are in a rendering: first and last character position per message, if known."""

    begins: dict[int, int]
    ends: dict[int, int]


def read_marks(marked: str) -> tuple[str, Places]:
    """A rendering without its marks, and their positions."""
    begins, ends = dict[int, int](), dict[int, int]()
    pieces, at, length = [], 0, 0
    for one in MARK.finditer(marked):
        pieces.append(marked[at : one.start()])
        length += one.start() - at
        at = one.end()
        number = int(one[2])
        if one[1] == BEGIN:
            begins.setdefault(number, length)
        else:
            ends[number] = length
    pieces.append(marked[at:])
    return "".join(pieces), Places(begins, ends)


def placeholder(i: int) -> str:
    """What replaces the text of message `i`."""
    return f"{BEGIN}{i}{CLOSE}"


def insert_placeholder(message: dict[str, Any], i: int, generated: bool) -> dict[str, Any]:
    """A message with a placeholder instead of its text; a generated one gets a content, unless its content is null."""
    if generated and message.get("content", "") is not None and not content_text(message).strip():
        message = {**message, "content": placeholder(i)}
    return map_content(Conversation([message]), lambda text: placeholder(i) if text.strip() else text).messages[0]


def split_at_placeholders(text: str) -> dict[int, tuple[int | None, str]]:
    """For every message with a placeholder in `text`: the one before it, and the text between the two."""
    found: dict[int, tuple[int | None, str]] = {}
    previous, at = None, 0
    for one in MARK.finditer(text):
        number = int(one[2])
        found.setdefault(number, (previous, text[at : one.start()]))
        previous, at = number, one.end()
    return found


def mark(message: dict[str, Any], i: int) -> dict[str, Any]:
    """A message with marks around its text and after the names of the tools that it calls.

    Marks go inside leading and trailing blanks, which templates often cut off.
    """
    marked = dict(message)
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        marked["content"] = _wrap(content, i, True, True)
    elif isinstance(content, list):
        spoken = [k for k, part in enumerate(content) if part_text(part).strip()]
        marked["content"] = [
            _replace_text(part, _wrap(part_text(part), i, k == spoken[0], k == spoken[-1])) if k in spoken else part
            for k, part in enumerate(content)
        ]
    if not content_text(message).strip():
        thoughts = [key for key in CONTENT_KEYS if key != "content" and part_text(message.get(key)).strip()]
        marked.update({key: _wrap(message[key], i, False, True) for key in thoughts})
    if message.get("tool_calls"):
        marked["tool_calls"] = [_mark_call(call, i) for call in message["tool_calls"]]
    return marked


def mark_end(text: str, number: int) -> str:
    """A text with the mark that ends number `number`, before trailing blanks."""
    return _wrap(text, number, False, True)


def _wrap(text: str, i: int, begin: bool, end: bool) -> str:
    core = text.strip()
    at = text.index(core)
    opening, closing = (f"{BEGIN}{i}{CLOSE}" if begin else ""), (f"{END}{i}{CLOSE}" if end else "")
    return text[:at] + opening + core + closing + text[at + len(core) :]


def _mark_call(call: Any, i: int) -> Any:
    inner = call.get("function") if isinstance(call, dict) else None
    if isinstance(inner, dict):
        return {**call, "function": _mark_call(inner, i)}
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        return {**call, "name": f"{call['name']}{END}{i}{CLOSE}"}
    return call


def part_text(part: Any) -> str:
    """The text of a content, or of a part of one; "" for anything else."""
    text = part.get("text", "") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _replace_text(part: Any, text: str) -> Any:
    return {**part, "text": text} if isinstance(part, dict) else text


def _texts(message: dict[str, Any]) -> Iterator[str]:
    for key in CONTENT_KEYS:
        value = message.get(key)
        yield from map(part_text, value) if isinstance(value, list) else (part_text(value),)


def content_text(message: dict[str, Any]) -> str:
    """The text of the content, parts joined."""
    value = message.get("content")
    return "".join(map(part_text, value)) if isinstance(value, list) else part_text(value)


def has_text(message: dict[str, Any]) -> bool:
    """Whether a message has a text, content or reasoning."""
    return any(text.strip() for text in _texts(message))


def leading_blank(message: dict[str, Any]) -> str:
    """The blanks that its content begins with."""
    text = content_text(message)
    return text[: len(text) - len(text.lstrip())]


def trailing_blank(message: dict[str, Any]) -> str:
    """The blanks that its content ends with."""
    text = content_text(message)
    return text[len(text.rstrip()) :]
