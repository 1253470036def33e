"""What a chat template writes around the messages of a chat: headers, ends of turns, generation prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.data.chat.conversation import BadChat, Conversation, common_start
from megatron.data.chat.marks import CLOSE, MARK, insert_placeholder, placeholder, split_at_placeholders
from megatron.data.chat.template import ChatTemplate

KEPT = 1024  # skeletons

Before = dict[int, tuple[int | None, str]]


@dataclass(frozen=True)
class Skeleton:
    """What a template writes around the messages of a chat, whatever their contents.

    `before`: for a message, the one whose content precedes it (None at the start) and the text in between;
    `last`, `after`: the message whose content is last, and the text after it;
    `prompt`: what the template adds for a model to begin its turn; `endings`: what ends each generated turn (""
    where nothing does); `call_ending`: what ends a turn that calls tools.
    """

    before: Before
    last: int | None
    after: str
    prompt: str
    endings: dict[int, str]
    call_ending: str

    def header(self, i: int) -> tuple[str, str]:
        """The text before the position where the model begins turn `i`, and what the template writes after it."""
        _, text = self.before.get(i, (None, ""))
        at = text.rfind(self.prompt) if self.prompt.strip() else -1
        cut = at + len(self.prompt) if at >= 0 else len(text)
        return text[:cut], text[cut:]


class SkeletonMaker:
    """Renders chats with placeholders to find their skeletons. `roles` and `added_tokens`: see `TurnFinder`."""

    def __init__(self, template: ChatTemplate, roles: Sequence[str], added_tokens: Sequence[str]) -> None:
        self.template, self.roles = template, tuple(roles)
        tokens = "|".join(re.escape(token) for token in sorted(added_tokens, key=len, reverse=True) if token.strip())
        self._leading = re.compile(rf"\s*(?:{tokens})" if tokens else r"(?!)")
        self._trailing = re.compile(rf"(?:{tokens})\Z" if tokens else r"(?!)")
        self._kept: dict[str, Skeleton] = {}

    def of(self, chat: Conversation) -> Skeleton:
        """The skeleton of a chat. Raises `BadChat` when the template refuses placeholders."""
        # A skeleton depends on this key only, so a kept one is as good as a new one.
        messages = [insert_placeholder(m, i, m["role"] in self.roles) for i, m in enumerate(chat.messages)]
        plain = replace(chat, messages=messages)
        key = json.dumps([plain.messages, plain.tools], default=repr)
        if key not in self._kept:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[key] = self._build(plain)
        return self._kept[key]

    def _build(self, plain: Conversation) -> Skeleton:
        generated = [i for i, m in enumerate(plain.messages) if m["role"] in self.roles]
        spoken = [i for i in generated if not plain.messages[i].get("tool_calls")]
        calling = [i for i in generated if plain.messages[i].get("tool_calls")]
        whole = self.template.render(plain)
        before = split_at_placeholders(whole)
        marks = list(MARK.finditer(whole))
        last, after = (int(marks[-1][2]), whole[marks[-1].end() :]) if marks else (None, "")
        closing = self._ending(self._until(plain, spoken[-1]), spoken[-1]) if spoken else ""
        endings = {i: self._ending_of(i, plain, before, closing) for i in spoken}
        call_ending = ""
        if calling:
            found = self._trailing.search(self._until(plain, calling[-1]).rstrip())
            call_ending = found[0] if found else closing
        return Skeleton(before, last, after, self._prompt(plain, generated, before), endings, call_ending)

    def _until(self, plain: Conversation, i: int) -> str:
        """The rendering of a chat that ends with message `i`, "" when the template refuses that."""
        try:
            return self.template.render(replace(plain, messages=plain.messages[: i + 1]))
        except BadChat:
            return ""

    def _ending(self, text: str, i: int) -> str:
        """What ends turn `i`, the last of the rendering `text`."""
        _, mark, tail = text.rpartition(placeholder(i))
        return self._ending_in(tail) if mark else ""

    def _ending_in(self, tail: str) -> str:
        """The end of turn in the text between a content and the next header: its first added token, else all of it."""
        token = self._leading.match(tail)
        return token[0] if token else tail.rstrip()

    def _ending_of(self, i: int, plain: Conversation, before: Before, last: str) -> str:
        following = next((j for j, (previous, _) in before.items() if previous == i), None)
        if following is None:
            return last
        between = before[following][1]
        if last and between.startswith(last):
            return last
        # The last turn ends differently from this one. The text before the next message is this turn's end, then what
        # precedes that message when it is alone.
        try:
            alone = split_at_placeholders(self.template.render(Conversation([plain.messages[following]])))
        except BadChat:
            return ""
        opening = next((text for _, text in alone.values()), "")
        header = common_start(between[::-1], opening[::-1])
        return self._ending_in(between[: len(between) - header])

    def _prompt(self, plain: Conversation, generated: list[int], before: Before) -> str:
        """What precedes a model's turn, by the template: "" when it has no generation prompt."""
        # Best after a message whose content can be distinguished from what the template writes.
        behind = [i for i in generated if before.get(i, (None, ""))[0] == i - 1] or [i for i in generated if i > 0]
        hidden = [i for i in generated if i > 0 and i not in before]  # without a content, so without a placeholder
        found = (self._prompt_of(plain, first, before) for first in [*behind[:1], *hidden[:1]])
        return next((prompt for prompt in found if prompt), "")

    def _prompt_of(self, plain: Conversation, first: int, before: Before) -> str:
        head = replace(plain, messages=plain.messages[:first])
        try:
            closed, opened = self.template.render(head), self.template.render(head, add_generation_prompt=True)
        except BadChat:
            return ""
        prompt = opened[common_start(closed, opened) :]
        previous, header = before.get(first, (None, ""))
        if not prompt.strip() and previous is not None:
            # Where turns have no header, the blank before an answer is the model's to write ("[/INST] Yes").
            reached = opened[opened.rfind(CLOSE) + 1 :]
            if reached.strip() and header.startswith(reached) and header[len(reached) :].isspace():
                return reached
        return prompt
