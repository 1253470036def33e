"""What a rendering holds of the messages of its chat: templates leave out reasoning, calls or names without a word.

A field is found by marks after its texts, which must leave the rest of the rendering as it is. Where a template looks
at a field, so that marks change what it does, its texts themselves are searched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.data.chat.conversation import BadChat, Conversation
from megatron.data.chat.marks import mark_end, part_text, read_marks
from megatron.data.chat.template import ChatTemplate

CALLS, CONTENT = "tool_calls", "content"

Span = tuple[int, int]
Place = tuple[int, str]  # number of a message, key of a field


@dataclass(frozen=True)
class Field:
    """A field that is in a rendering.

    `texts`: the keys and values that it holds; `ends`: where each ends, None where marks could not be used.
    """

    texts: tuple[str, ...]
    ends: tuple[int, ...] | None

    def is_inside(self, text: str, spans: Sequence[Span]) -> bool:
        """Whether all of it is inside `spans` of the rendering `text`."""
        if self.ends is None:
            return _has_all(cut(text, spans), self.texts)
        return all(any(start < at <= end for start, end in spans) for at in self.ends)


@dataclass(frozen=True)
class Written:
    """The fields of a chat's messages, apart from role and content: those in its rendering, and the others."""

    found: Mapping[Place, Field]
    missing: tuple[Place, ...]

    def require_calls(self, numbers: Sequence[int]) -> None:
        """Raise `BadChat` when one of these messages calls tools and not all of its calls are written."""
        lost = next((i for i, key in self.missing if key == CALLS and i in numbers), None)
        if lost is not None:
            raise BadChat(
                f"the chat template does not write the tool calls of message {lost + 1}, or not all of them, so they "
                "cannot be trained; give a template that does (--chat-template)"
            )


def find_fields(template: ChatTemplate, chat: Conversation, text: str) -> Written:
    """Which fields of the messages of `chat` are in `text`, its rendering."""
    places = [
        (i, key)
        for i, message in enumerate(chat.messages)
        for key, value in message.items()
        if key not in ("role", CONTENT) and value not in (None, "", [], {})
    ]
    if not places:
        return Written({}, ())
    together = _find_marks(template, chat, text, places)
    found, missing = dict[Place, Field](), list[Place]()
    for place in places:
        ends = together if together is not None else _find_marks(template, chat, text, [place])
        field = _field(template, chat, text, place, ends)
        if field is None:
            missing.append(place)
        else:
            found[place] = field
    return Written(found, tuple(missing))


def is_content_lost(template: ChatTemplate, chat: Conversation, text: str, number: int) -> bool:
    """Whether it is certain that nothing of a message's content is in `text`, the rendering of `chat`."""
    ends = _find_marks(template, chat, text, [(number, CONTENT)])
    return ends is not None and not any(at is not None for at in ends[(number, CONTENT)])


def has_content(text: str, message: Mapping[str, Any]) -> bool:
    """Whether the whole content of a message is in `text`, apart from blanks around it."""
    content = message.get(CONTENT)
    parts = content if isinstance(content, list) else [content]
    return all(part_text(part).strip() in text for part in parts)


def cut(text: str, spans: Sequence[Span]) -> str:
    """What is inside `spans` of a text, on lines of its own."""
    return "\n".join(text[start:end] for start, end in spans)


def _field(
    template: ChatTemplate, chat: Conversation, text: str, place: Place, ends: dict[Place, list[int | None]] | None
) -> Field | None:
    """The field at `place` if all of it is in `text`."""
    number, key = place
    texts = list[str]()

    def collect(one: str) -> str:
        texts.append(one)
        return one

    _change(key, chat.messages[number][key], collect)
    if not texts:  # numbers: in it if it depends on them
        messages = [{k: v for k, v in m.items() if (i, k) != place} for i, m in enumerate(chat.messages)]
        return Field((), ()) if _render(template, replace(chat, messages=messages)) != text else None
    if ends is None:
        return Field(tuple(texts), None) if _has_all(text, texts) else None
    known = tuple(at for at in ends[place] if at is not None)
    return Field(tuple(texts), known) if len(known) == len(texts) else None


def _find_marks(
    template: ChatTemplate, chat: Conversation, text: str, places: Sequence[Place]
) -> dict[Place, list[int | None]] | None:
    """Where each text of the fields at `places` ends in `text`; None when marks change the rest of the rendering."""
    numbers, count = dict[Place, range](), 0
    messages = [dict(message) for message in chat.messages]

    def mark(text: str) -> str:
        nonlocal count
        count += 1
        return mark_end(text, count - 1)

    for place in places:
        number, key = place
        first = count
        messages[number][key] = _change(key, messages[number][key], mark)
        numbers[place] = range(first, count)
    marked = _render(template, replace(chat, messages=messages))
    plain, found = read_marks(marked or "")
    return {place: [found.ends.get(k) for k in own] for place, own in numbers.items()} if plain == text else None


def _render(template: ChatTemplate, chat: Conversation) -> str | None:
    try:
        return template.render(chat)
    except BadChat:
        return None


def _change(key: str, value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` applied to every text that it holds, blank ones excepted.

    Of tool calls these are names and arguments: ids and types only connect messages. Of a content, the text.
    """
    if key == CONTENT and isinstance(value, list):
        return [{**p, "text": change(p["text"])} if part_text(p).strip() else p for p in value]
    if key == CALLS and isinstance(value, list):
        return [_change_call(call, change) for call in value]
    if isinstance(value, str):
        return change(value) if value.strip() else value
    if isinstance(value, Mapping):
        return {_change("", k, change): _change("", v, change) for k, v in value.items()}
    return [_change("", item, change) for item in value] if isinstance(value, list | tuple) else value


def _change_call(call: Any, change: Callable[[str], str]) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _change_call(call["function"], change)}
    return {**call, **{k: _change("", call[k], change) for k in ("name", "arguments") if k in call}}


def _has_all(text: str, parts: Sequence[str]) -> bool:
    """Whether `parts` are in `text`, in order, as they are or as JSON writes them."""
    at = 0
    for part in parts:
        forms = (part.strip(), json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1])
        ends = [found + len(form) for form in forms if (found := text.find(form, at)) >= 0]
        if not ends:
            return False
        at = min(ends)
    return True
