"""What of a Hugging Face dataset's records is exported: the column is found, then every record is turned into a line.

A line of the export is `{"text": ...}`, or `{"messages": [...]}` (with `"tools"` where the record has any) for chats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.data.chat.conversation import BadChat, Conversation, conversation
from megatron.errors import UserError, nearest

Kind = Literal["text", "messages", "join"]
Flatten = Literal["", "midtrain", "plain"]

BLANK_LINE = "\n\n"


class Unusable(Exception):
    """A record whose column holds what cannot be exported; the message says what."""


@dataclass(frozen=True)
class Layout:
    """Which columns are read and what becomes of them.

    `kind`: "text" (a column of texts), "messages" (a column of chats), "join" (several columns make one text).
    `flatten` makes a text of a chat: "midtrain" joins what is said, without the roles; "plain" writes the list out.
    """

    kind: Kind
    columns: tuple[str, ...]
    flatten: Flatten = ""

    @property
    def key(self) -> str:
        """The key of the export: "messages" where chats stay chats, else "text"."""
        return "messages" if self.kind == "messages" and not self.flatten else "text"

    def render(self, record: Mapping[str, Any]) -> dict[str, Any] | None:
        """The line of a record, None when there is nothing in it. Raises `Unusable`."""
        if self.kind == "join":
            return _text_line(
                BLANK_LINE.join(_as_text(v) for c in self.columns if (v := record.get(c)) not in (None, ""))
            )
        column = self.columns[0]
        if column not in record:
            raise Unusable(f"no key {column!r}.{nearest(column, list(record))} The record has: {', '.join(record)}")
        value = record[column]
        if value is None:
            return None
        if self.kind == "text":
            if not isinstance(value, str):
                raise Unusable(f"key {column!r} holds {_kind_of(value)}, not a string")
            return _text_line(value)
        chat = self._chat(value, record.get("tools"))
        if not chat.messages:
            return None
        if self.flatten == "midtrain":
            return _text_line(
                BLANK_LINE.join(said for turn in chat.messages if (said := content_text(turn.get("content"))))
            )
        if self.flatten == "plain":
            return _text_line(str(chat.messages))
        return {"messages": chat.messages, **({"tools": chat.tools} if chat.tools else {})}

    def _chat(self, value: Any, tools: Any) -> Conversation:
        try:
            return conversation(without_nulls(value), tools)
        except BadChat as error:
            raise Unusable(f"key {self.columns[0]!r}: {error}") from error


def detect(
    columns: Sequence[str],
    sample: Sequence[Mapping[str, Any]],
    *,
    join_columns: Sequence[str] = (),
    text_column: str | None = None,
    midtrain: bool = False,
    skip_template: bool = False,
) -> Layout:
    """The layout that flags and data ask for: joined columns, else the column named, else (for `midtrain`) `messages`,
    else the first of `text` and `messages` that is there.

    `columns` are the names in the data, `sample` its first records. Raises `UserError` naming the columns there are.
    """
    if join_columns:
        for name in join_columns:
            _require(name, columns, "--join-columns")
        return Layout("join", tuple(join_columns))
    flatten: Flatten = "midtrain" if midtrain else "plain" if skip_template else ""
    if text_column:
        _require(text_column, columns, "--text-column")
        name = text_column
    elif midtrain:
        _require("messages", columns, "--midtrain-chat-messages")
        name = "messages"
    else:
        found = next((name for name in ("text", "messages") if name in columns), None)
        if found is None:
            raise UserError(
                f"no column 'text' or 'messages'. The data has: {', '.join(columns) or 'no column'}."
                f"{_hints(columns, sample)}"
            )
        name = found
    kind = _column_kind(name, sample)
    if kind is None:
        raise UserError(
            f"column {name!r} holds {_kind_of(_first(name, sample))}: neither texts nor chats "
            f"(lists of objects with role and content).{_hints(columns, sample)}"
        )
    if midtrain and kind == "text":
        raise UserError(f"--midtrain-chat-messages: column {name!r} holds texts, not chats; leave the flag out")
    return Layout(kind, (name,), flatten if kind == "messages" else "")


def is_chat(value: Any) -> bool:
    """Whether a column's value is a chat with something in it."""
    try:
        return bool(conversation(without_nulls(value)).messages)
    except BadChat:
        return False


def without_nulls(value: Any) -> Any:
    """`value` with the keys of its objects left out whose value is null, at every depth.

    A column store gives every turn, and every tool call, the keys of all others, and templates ask whether a key is
    there.
    """
    if isinstance(value, Mapping):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(item) for item in value]
    return value


def content_text(content: Any) -> str:
    """What a turn says, as text: of a list of typed parts the texts, else anything that is no string as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text") or "") for part in content)
    return _as_text(content) if content else ""


def _text_line(text: str) -> dict[str, str] | None:
    return {"text": text} if text and not text.isspace() else None


def _as_text(value: Any) -> str:
    if isinstance(value, (Mapping, list)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _column_kind(name: str, sample: Sequence[Mapping[str, Any]]) -> Kind | None:
    """What the first value of a column is; an empty column counts as texts."""
    value = _first(name, sample)
    if is_chat(value):
        return "messages"
    return "text" if value is None or isinstance(value, str) else None


def _first(name: str, sample: Sequence[Mapping[str, Any]]) -> Any:
    return next((record[name] for record in sample if record.get(name) not in (None, [])), None)


def _require(name: str, columns: Sequence[str], flag: str) -> None:
    if name not in columns:
        raise UserError(f"{flag}: no column {name!r}.{nearest(name, list(columns))} The data has: {', '.join(columns)}")


def _hints(columns: Sequence[str], sample: Sequence[Mapping[str, Any]]) -> str:
    kinds = {name: _column_kind(name, sample) for name in columns if _first(name, sample) is not None}
    chats, texts = ([n for n, kind in kinds.items() if kind == wanted] for wanted in ("messages", "text"))
    said = f" Chats: {', '.join(chats)}." if chats else ""
    said += f" Texts: {', '.join(texts)}." if texts else ""
    return f"{said} Name one with --text-column, or several with --join-columns A,B" if said else ""


def _kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true/false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
