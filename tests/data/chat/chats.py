"""Chats for the tests, and short ways to what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.data.chat.conversation import Conversation
from megatron.data.chat.encoder import ChatEncoder, ChatOptions
from megatron.data.chat.template import ChatTemplate, load_template
from megatron.data.chat.tokenizer import chat_tokenizer
from megatron.data.tokenise.chunks import RowChunk
from megatron.data.tokenise.encode import Encoded
from tests.data.chat.templates import SPECIAL, TEMPLATES, write_folder

Message = dict[str, Any]


def say(*turns: tuple[str, str]) -> list[Message]:
    """Messages from (role, content)."""
    return [{"role": role, "content": content} for role, content in turns]


THREE = say(
    ("user", "Hi there"),
    ("assistant", "Hello, one."),
    ("user", "Again?\n"),
    ("assistant", "  Two: café 🤖\n    indented"),
    ("user", "And?"),
    ("assistant", "Third.\n\nWith a second paragraph."),
)
THOUGHTS = say(
    ("user", "Hi there"),
    ("assistant", "<think>\none\n</think>\n\nAnswer one."),
    ("user", "Again?"),
    ("assistant", "<think>\ntwo\n</think>\n\nAnswer two."),
    ("user", "And?"),
    ("assistant", "<think>\nthree\n</think>\n\nAnswer three."),
)


def template(name: str, **extra: Any) -> ChatTemplate:
    """One of the templates, with its tokens."""
    source, bos, eos = TEMPLATES[name]
    return ChatTemplate(source, {"eos_token": eos, **({"bos_token": bos} if bos else {})}, extra=extra)


def chat(messages: list[Message], tools: list[Any] | None = None, prompt: int = 0) -> Conversation:
    return Conversation(messages, tools, prompt)


def encoder(folder: Path, name: str, options: ChatOptions | None = None) -> ChatEncoder:
    """The encoder over a folder written for that template."""
    if not folder.exists():
        write_folder(folder, name)
    tokenizer, found = chat_tokenizer(str(folder)), load_template(folder)
    return ChatEncoder(tokenizer, found, options or ChatOptions(), found.eos_id(tokenizer))


def rows(*records: dict[str, Any]) -> RowChunk:
    return RowChunk("memory", 0, list(records), 1)


def documents(encoded: Encoded, output: int) -> list[list[int]]:
    """The items of one output."""
    found, at = [], 0
    for length in encoded.lengths[output].tolist():
        found.append(encoded.ids[output][at : at + length].tolist())
        at += length
    return found


def trained_texts(made: ChatEncoder, tokens: list[int], labels: list[int]) -> list[str]:
    """The decoded text of every run of trained tokens."""
    runs: list[list[int]] = [[]]
    for token, label in zip(tokens, labels):
        assert label in (token, -100)
        if label >= 0:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [made.tokenizer.detokenize(run) for run in runs if run]


def added_tokens() -> tuple[str, ...]:
    return SPECIAL
