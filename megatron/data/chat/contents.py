"""Contents in the form that a chat template accepts: texts instead of parts, and what stands for no content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.data.chat.conversation import BadChat, Conversation, join_parts
from megatron.data.chat.marks import content_text
from megatron.data.chat.template import ChatTemplate
from megatron.data.chat.written import CALLS, CONTENT, find_fields


def adapt_contents(template: ChatTemplate, chat: Conversation) -> Conversation:
    """The chat with contents that the template accepts, as it is where it accepts that. Raises `BadChat`."""
    return _fill(template, _join(template, chat))


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


def _fill(template: ChatTemplate, chat: Conversation) -> Conversation:
    """The chat, with the kind of no content next to tool calls or reasoning for which the template writes them all.

    Some templates need a text, be it empty; DeepSeek-V3's writes calls only next to null.
    """
    empty = [i for i, m in enumerate(chat.messages) if CONTENT not in m or (m.get(CALLS) and not content_text(m))]
    if not empty:
        return chat
    accepted, refusal = list[Conversation](), list[BadChat]()
    for form in _forms(chat, empty):
        try:
            text = template.render(form)
        except BadChat as error:
            refusal.append(error)
            continue
        if not any(key == CALLS for _, key in find_fields(template, form, text).missing):
            return form
        accepted.append(form)
    if not accepted:
        raise refusal[0]
    return accepted[0]


def _forms(chat: Conversation, empty: list[int]) -> Iterator[Conversation]:
    """The chat, and with "" or null as the contents of the messages `empty`."""
    yield chat
    for content in ("", None):
        yield replace(
            chat, messages=[{**m, CONTENT: content} if i in empty else m for i, m in enumerate(chat.messages)]
        )
