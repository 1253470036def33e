"""Contents in the form that a chat template accepts: texts instead of parts, and what stands for no content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.data.chat.conversation import BadChat, Conversation, join_parts
from megatron.data.chat.marks import content_text
from megatron.data.chat.template import ChatTemplate
from megatron.data.chat.written import CALLS, CONTENT, Span, Written, find_fields


@dataclass(frozen=True)
class Form:
    """A chat in a form that its template accepts: `text` is its rendering, `spans` are what the template's tags enclose
    in it, if there are any, and `written` are the fields of messages that it has."""

    chat: Conversation
    text: str
    spans: list[Span]
    written: Written


def choose_form(template: ChatTemplate, chat: Conversation) -> Form:
    """The chat as it is, or the first form of it that the template accepts and of which it writes all tool calls.

    Some templates need a text next to calls, be it empty; DeepSeek-V3's writes calls only next to null. When none is
    written whole, the first form that is accepted. Raises `BadChat` when none is.
    """
    chat = _join(template, chat)
    empty = [i for i, m in enumerate(chat.messages) if CONTENT not in m or (m.get(CALLS) and not content_text(m))]
    accepted, refusals = list[Form](), list[BadChat]()
    for one in _forms(chat, empty):
        try:
            text, spans = template.render_tagged(one) if template.is_tagged(one) else (template.render(one), [])
        except BadChat as error:
            refusals.append(error)
            continue
        form = Form(one, text, spans, find_fields(template, one, text))
        if not any(key == CALLS for _, key in form.written.missing):
            return form
        accepted.append(form)
    if not accepted:
        raise refusals[0]
    return accepted[0]


def _join(template: ChatTemplate, chat: Conversation) -> Conversation:
    """The chat, with contents in parts joined if the template accepts only texts.

    Such a template fails for a list or, worse, writes its Python representation.
    """
    parts = [message[CONTENT] for message in chat.messages if isinstance(message.get(CONTENT), list)]
    if not parts:
        return chat
    try:
        text = template.render(chat)
    except BadChat:
        return join_parts(chat)
    return join_parts(chat) if any(str(part) in text for part in parts) else chat


def _forms(chat: Conversation, empty: list[int]) -> Iterator[Conversation]:
    """The chat, then with "" and null as the contents of the messages `empty`, if there are any."""
    yield chat
    for content in ("", None) if empty else ():
        yield replace(
            chat, messages=[{**m, CONTENT: content} if i in empty else m for i, m in enumerate(chat.messages)]
        )
