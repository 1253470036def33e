"""Chats as the model was trained on them: turns become a prompt by the tokenizer's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError

from megatron.errors import UserError
from megatron.inference.exported_text import ExportedText
from megatron.inference.inputs import Prompt
from megatron.tokenizer import Tokenizer


class Written(NamedTuple):
    """A prompt as the model is to see it. `templated`: a template has written what begins the text, too."""

    text: str
    templated: bool = False


def tokenize(texts: Sequence[Written], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of prompts, without a start that only the tokenizer put before what a template has written."""
    found = tokenizer.tokenize_openly([written.text for written in texts])
    start = list(tokenizer.added[0])
    begin = tokenizer.detokenize(start) or "\0"
    bare = [written.templated and not written.text.startswith(begin) for written in texts]
    return [ids[len(start) :] if strip else ids for ids, strip in zip(found, bare, strict=True)]


class Chats:
    """Writes prompts as the tokenizer's chat template has them, up to where the model begins its turn.

    Args:
        every: a prompt that is a text is what a user says; else only chats are written by the template.
        system: the first turn of a chat that begins with a text.

    Raises:
        UserError: the tokenizer has no template.
    """

    def __init__(self, exported: ExportedText, every: bool, system: str | None) -> None:
        exported.require_chat_template("chat" if every else "sample_input_file: `messages`")
        self.exported, self.every, self.system = exported, every, system

    def begin(self) -> list[dict[str, Any]]:
        """The turns before the user's first."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def write(self, prompt: Prompt) -> Written:
        """A prompt as the model is to see it."""
        if not isinstance(prompt, str):
            return self.write_turns(prompt)
        return self.write_turns([*self.begin(), {"role": "user", "content": prompt}]) if self.every else Written(prompt)

    def write_turns(
        self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Written:
        """The text of a chat, which may call `tools`. Raises `UserError` when the template refuses it."""
        try:
            return Written(self.exported.write_chat(turns, add_generation_prompt=True, tools=tools), templated=True)
        except TemplateError as error:
            raise UserError(f"the chat template refuses {[turn['role'] for turn in turns]}: {error}") from error
