"""Which columns of a Hugging Face dataset are exported, and how a record becomes a line.

A line of the export is `{"text": ...}`, or `{"messages": [...]}` (with `"tools"` where the record has any) for chats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.data.chat.conversation import BadChat, Conversation, conversation, without_nulls
from megatron.data.tokenise.chunks import json_kind
from megatron.errors import UserError, nearest

Kind = Literal["text", "messages", "join"]
Flatten = Literal["", "midtrain", "plain"]

BLANK_LINE = "\n\n"


class Unusable(Exception):
    """A record that cannot be exported; the message says why."""


@dataclass(frozen=True)
class Layout:
    """Which columns are read and how.

    `kind`: "text" (a column of texts), "messages" (a column of chats), "join" (several columns make one text).
    `flatten` makes a text of a chat: "midtrain" joins the contents, without the roles; "plain" writes out the list.
    """

    kind: Kind
    columns: tuple[str, ...]
    flatten: Flatten = ""

    @property
    def key(self) -> str:
        """The key of the export: "messages" where chats stay chats, else "text"."""
        return "messages" if self.kind == "messages" and not self.flatten else "text"

    def render(self, record: Mapping[str, Any]) -> dict[str, Any] | None:
        """The line of a record, None when it is empty. Raises `Unusable`."""
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
                raise Unusable(f"key {column!r} holds {json_kind(value)}, not a string")
            return _text_line(value)
        chat = self._chat(value, record.get("tools"))
        if not chat.messages:
            return None
        if self.flatten == "midtrain":
            contents = (content_as_text(turn.get("content")) for turn in chat.messages)
            return _text_line(BLANK_LINE.join(filter(None, contents)))
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
    """The layout by flags and data: joined columns, else the column named, else (for `midtrain`) `messages`, else the
    first of `text` and `messages` that exists.

    `columns` are the names in the data, `sample` its first records. Raises `UserError` with the columns of the data.
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
            f"column {name!r} holds {json_kind(_first(name, sample))}: neither texts nor chats "
            f"(lists of objects with role and content).{_hints(columns, sample)}"
        )
    if midtrain and kind == "text":
        raise UserError(f"--midtrain-chat-messages: column {name!r} holds texts, not chats; leave the flag out")
    return Layout(kind, (name,), flatten if kind == "messages" else "")


def is_chat(value: Any) -> bool:
    """Whether a column's value is a chat with at least one message."""
    try:
        return bool(conversation(without_nulls(value)).messages)
    except BadChat:
        return False


def content_as_text(content: Any) -> str:
    """The content of a turn as text: the texts of a list of typed parts, JSON of anything else that is not a string."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text") or "") for part in content)
    return _as_text(content) if content else ""


def _text_line(text: str) -> dict[str, str] | None:
    return {"text": text} if text else None


def _as_text(value: Any) -> str:
    if isinstance(value, (Mapping, list)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _column_kind(name: str, sample: Sequence[Mapping[str, Any]]) -> Kind | None:
    """The kind of the first value of a column; an empty column counts as texts."""
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
    found = f" Chats: {', '.join(chats)}." if chats else ""
    found += f" Texts: {', '.join(texts)}." if texts else ""
    return f"{found} Name one with --text-column, or several with --join-columns A,B" if found else ""
