"""Where the trained turns of a chat stand in its rendering, as spans of characters.

A template with `{% generation %}` tags says so itself. For all others the answer is derived, without assuming that the
rendering of the first messages is a prefix of the rendering of all (templates that drop earlier reasoning break that):

* The chat is rendered again with marks around what is said in every message. Without the marks that must be the
  rendering itself; then the marks show where each content really stands, whatever the template did to it.
* The chat is rendered once with placeholders instead of contents: the text in between is what the template writes
  around a message. Of what precedes a turn, everything up to the end of the generation prompt is its header.
* A turn that is the last one shows what ends a turn.

So a turn reaches from the end of its header, which is where a model begins to write, to its end-of-turn token. Whatever
cannot be shown to be in its place is an error that names the message, never a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.data.chat.conversation import SAID, BadChat, Conversation, common_start, map_content
from megatron.data.chat.template import ChatTemplate

# Code points that Unicode sets apart for use inside a program; no text that is exchanged holds them.
BEGIN, END, CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
MARK = re.compile(f"([{BEGIN}{END}])(\\d+){CLOSE}")
KEPT_SKELETONS = 1024


@dataclass(frozen=True)
class Turn:
    """Message `number` (counted from 0) is trained from character `start` to before `end` of the rendering."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class Rendered:
    """The text of a chat and its trained turns, in order and without overlap."""

    text: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Skeleton:
    """What a template writes around the messages of a chat, whatever is said in them.

    `before`: for a message, the one whose content stands before it (None at the start) and the text in between;
    `last`, `after`: the message whose content stands last, and the text behind it;
    `prompt`: what the template adds for a model to begin its turn; `endings`: what ends each generated turn ("" where
    nothing does); `call_ending`: what ends a turn that calls tools.
    """

    before: dict[int, tuple[int | None, str]]
    last: int | None
    after: str
    prompt: str
    endings: dict[int, str]
    call_ending: str

    def header(self, i: int) -> tuple[str, str]:
        """What precedes the place where the model begins to write turn `i`, and what the template puts after that."""
        _, text = self.before.get(i, (None, ""))
        at = text.rfind(self.prompt) if self.prompt.strip() else -1
        cut = at + len(self.prompt) if at >= 0 else len(text)
        return text[:cut], text[cut:]


@dataclass(frozen=True)
class Places:
    """Where the contents stand in a rendering: first and last character position per message, where known."""

    begins: dict[int, int]
    ends: dict[int, int]


class TurnFinder:
    """Renders chats and finds the turns of the generation roles in them.

    Args:
        template: the chat template.
        roles: whose turns are trained.
        added_tokens: tokens that are never part of plain text (`<|im_end|>`); one that follows a turn ends it.
        only_last: only the last turn of these roles is trained.
        leave_open: the chat ends with its last content, to be continued: without an end of turn.
    """

    def __init__(
        self,
        template: ChatTemplate,
        roles: Sequence[str] = ("assistant",),
        added_tokens: Sequence[str] = (),
        *,
        only_last: bool = False,
        leave_open: bool = False,
    ) -> None:
        self.template, self.roles, self.only_last, self.leave_open = template, tuple(roles), only_last, leave_open
        tokens = "|".join(re.escape(token) for token in sorted(added_tokens, key=len, reverse=True) if token.strip())
        self._leading = re.compile(rf"\s*(?:{tokens})" if tokens else r"(?!)")
        self._trailing = re.compile(rf"(?:{tokens})\Z" if tokens else r"(?!)")
        self._skeletons: dict[str, Skeleton] = {}

    def find(self, chat: Conversation) -> Rendered:
        """The rendering of `chat` and the turns to train. Raises `BadChat`, naming the message where there is one."""
        generated = [i for i, m in enumerate(chat.messages) if m["role"] in self.roles and i >= chat.prompt]
        generated = generated[-1:] if self.only_last else generated
        # The tags speak of the assistant; `transformers` does not combine them with a chat that is left open.
        if self.template.is_tagged(chat) and self.roles == ("assistant",) and not self.leave_open:
            return self._tagged(chat, generated)
        text = self.template.render(chat, leave_open=self.leave_open)
        if not generated:
            return Rendered(text, ())
        skeleton, places = self._skeleton(chat), self._places(chat, text)
        turns, low = [], 0
        for i in generated:
            turn = self._turn(i, chat, text, skeleton, places, low)
            if turn.end > turn.start:
                turns.append(turn)
                low = turn.end
        return Rendered(text, tuple(turns))

    def _tagged(self, chat: Conversation, generated: list[int]) -> Rendered:
        text, spans = self.template.render_tagged(chat)
        if not generated:
            return Rendered(text, ())
        if generated[0] > 0 and (self.only_last or chat.prompt):
            # Each turn has the same number of tags in whatever part of the chat it is rendered.
            _, earlier = self.template.render_tagged(replace(chat, messages=chat.messages[: generated[0]]))
            spans = spans[len(earlier) :]
        turns = tuple(Turn(generated[0], start, end) for start, end in spans if end > start)
        if not turns and any(_said(chat.messages[i]) for i in generated):
            raise BadChat(f"{_name(chat, generated[0])}: the template's {{% generation %}} tags leave it out")
        return Rendered(text, turns)

    # ---- one turn

    def _turn(self, i: int, chat: Conversation, text: str, skeleton: Skeleton, places: Places, low: int) -> Turn:
        message = chat.messages[i]
        said, calls = _said(message), bool(message.get("tool_calls"))
        end = len(text) if self._is_open(i, chat) else self._end(i, chat, text, skeleton, places)
        high = self._begin_of_next(i, places, len(text)) if end is None else end
        start = self._start(i, chat, text, skeleton, places, low, high)
        if start is None and not calls and not said:
            return Turn(i, low, low)  # the template leaves an answer without content out, or its header
        begin = places.begins.get(i)
        lost = end is None and said and not calls
        if lost or start is None or start < low or (begin is not None and start > begin):
            raise BadChat(f"{_name(chat, i)}: {LOST}")
        if self._is_open(i, chat):
            return Turn(i, start, len(text))
        if calls or (said and not _text_of(message).strip()):  # more may follow what is marked
            stop = self._end_of_call(i, text, skeleton, start if end is None else end, places)
            if stop is None or not _holds(text[start:stop], message):
                raise BadChat(f"{_name(chat, i)}: cannot tell where it ends; {TAGS}")
            return Turn(i, start, stop)
        return self._ended(i, message, text, skeleton, places, Turn(i, start, start if end is None else end))

    def _ended(
        self, i: int, message: dict[str, Any], text: str, skeleton: Skeleton, places: Places, turn: Turn
    ) -> Turn:
        """The turn with what ends it; `turn` ends with its content, blanks at the end of that perhaps left out."""
        ending = skeleton.endings.get(i, "")
        blank = _trailing_blank(message)
        tails = (blank + ending, ending, blank) if ending.strip() or _said(message) else ()
        tail = next((t for t in tails if text.startswith(t, turn.end)), "")
        stop = turn.end + len(tail)
        places.ends.setdefault(i, stop - len(ending) if tail.endswith(ending) else stop)  # the next may be found by it
        if _said(message) and not ending and not text[stop:].strip():
            stop = len(text)  # nothing but the eos that will be appended ends it, so the model has to get there
        return replace(turn, end=stop)

    def _is_open(self, i: int, chat: Conversation) -> bool:
        return self.leave_open and i == len(chat.messages) - 1

    def _end(self, i: int, chat: Conversation, text: str, skeleton: Skeleton, places: Places) -> int | None:
        """Where what is said in message `i` ends, None when that cannot be shown."""
        if i in places.ends:
            return places.ends[i]
        following = next((j for j, (previous, _) in skeleton.before.items() if previous == i), None)
        if following is None:
            ends_so = i == skeleton.last and text.endswith(skeleton.after)
            return len(text) - len(skeleton.after) if ends_so else None
        begin, between = places.begins.get(following), skeleton.before[following][1]
        for blank in (_leading_blank(chat.messages[following]), ""):
            if begin is not None and text.endswith(between + blank, 0, begin):
                return begin - len(between + blank)
        return None

    def _start(
        self, i: int, chat: Conversation, text: str, skeleton: Skeleton, places: Places, low: int, high: int
    ) -> int | None:
        """Where the header of turn `i` ends, None when that cannot be shown."""
        if i not in skeleton.before:
            return _behind_the_only(skeleton.prompt, text, low, high)
        header, inserted = skeleton.header(i)
        at = header.rfind(skeleton.prompt) if skeleton.prompt.strip() else -1
        own = header[at:] if at >= 0 else header
        # Its header may stand before its content ...
        begin = places.begins.get(i)
        for blank in (_leading_blank(chat.messages[i]), ""):
            if begin is not None and text[low:begin].endswith(own + inserted + blank):
                return begin - len(inserted) - len(blank)
        # ... or behind the content of the message before it ...
        previous = skeleton.before[i][0]
        known = 0 if previous is None else places.ends.get(previous)
        between = "" if previous is None else _trailing_blank(chat.messages[previous])
        for blank in (between, ""):
            if known is not None and text.startswith(blank + header, known):
                return known + len(blank + header)
        # ... and if neither is known, there must be only one.
        return _behind_the_only(own, text, low, high)

    def _begin_of_next(self, i: int, places: Places, default: int) -> int:
        after = [at for marks in (places.begins, places.ends) for j, at in marks.items() if j > i]
        return min(after, default=default)

    def _end_of_call(self, i: int, text: str, skeleton: Skeleton, at: int, places: Places) -> int | None:
        high = self._begin_of_next(i, places, len(text))
        for ending in (skeleton.call_ending, skeleton.endings.get(i, "")):
            if ending.strip() and (found := text.find(ending, at, high)) >= 0:
                return found + len(ending)
        return None

    # ---- where contents stand

    def _places(self, chat: Conversation, text: str) -> Places:
        """Positions of the contents in `text`. A message that cannot be marked without changing `text` has none."""
        if any(mark in text for mark in (BEGIN, END, CLOSE)):
            raise BadChat("it holds code points U+FDD0..U+FDD2, which no text may hold")
        everyone = range(len(chat.messages))
        found = self._positions(chat, text, everyone)
        if found is not None:
            return found
        begins, ends = dict[int, int](), dict[int, int]()
        for i in everyone:
            one = self._positions(chat, text, (i,))
            if one is not None:
                begins.update(one.begins)
                ends.update(one.ends)
        return Places(begins, ends)

    def _positions(self, chat: Conversation, text: str, which: Sequence[int]) -> Places | None:
        messages = [_marked(m, i) if i in which else m for i, m in enumerate(chat.messages)]
        try:
            marked = self.template.render(replace(chat, messages=messages), leave_open=self.leave_open)
        except BadChat:
            return None
        begins, ends = dict[int, int](), dict[int, int]()
        pieces, at, length = [], 0, 0
        for mark in MARK.finditer(marked):
            pieces.append(marked[at : mark.start()])
            length += mark.start() - at
            at = mark.end()
            number = int(mark[2])
            if mark[1] == BEGIN:
                begins.setdefault(number, length)
            else:
                ends[number] = length
        pieces.append(marked[at:])
        return Places(begins, ends) if "".join(pieces) == text else None

    # ---- what the template writes around them

    def _skeleton(self, chat: Conversation) -> Skeleton:
        # Depends on nothing but this key, so that keeping it cannot change what comes out.
        plain = replace(chat, messages=[self._blanked(m, i) for i, m in enumerate(chat.messages)])
        key = json.dumps([plain.messages, plain.tools], default=repr)
        if key not in self._skeletons:
            if len(self._skeletons) >= KEPT_SKELETONS:
                self._skeletons.clear()
            self._skeletons[key] = self._build_skeleton(plain)
        return self._skeletons[key]

    def _blanked(self, message: dict[str, Any], i: int) -> dict[str, Any]:
        placeholder = f"{BEGIN}{i}{CLOSE}"
        if message["role"] in self.roles and not _text_of(message).strip():
            message = {**message, "content": placeholder}
        return map_content(Conversation([message]), lambda text: placeholder if text.strip() else text).messages[0]

    def _build_skeleton(self, plain: Conversation) -> Skeleton:
        generated = [i for i, m in enumerate(plain.messages) if m["role"] in self.roles]
        spoken = [i for i in generated if not plain.messages[i].get("tool_calls")]
        calling = [i for i in generated if plain.messages[i].get("tool_calls")]
        whole = self.template.render(plain)
        before = _between(whole)
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
        _, mark, tail = text.rpartition(f"{BEGIN}{i}{CLOSE}")
        return self._ending_in(tail) if mark else ""

    def _ending_in(self, tail: str) -> str:
        """The end of turn in what follows a content up to the next header: its first added token, else all of it."""
        token = self._leading.match(tail)
        return token[0] if token else tail.rstrip()

    def _ending_of(self, i: int, plain: Conversation, before: dict[int, tuple[int | None, str]], last: str) -> str:
        following = next((j for j, (previous, _) in before.items() if previous == i), None)
        if following is None:
            return last
        between = before[following][1]
        if last and between.startswith(last):
            return last
        # The last turn ends in another way than this one. What stands before the next message of the chat also stands
        # before it when it is alone, but for the end of this turn.
        try:
            alone = _between(self.template.render(Conversation([plain.messages[following]])))
        except BadChat:
            return ""
        opening = next((text for _, text in alone.values()), "")
        header = common_start(between[::-1], opening[::-1])
        return self._ending_in(between[: len(between) - header])

    def _prompt(self, plain: Conversation, generated: list[int], before: dict[int, tuple[int | None, str]]) -> str:
        """What a model begins its turn after, as far as the template says: "" when it has no generation prompt."""
        # Best behind a message whose content can be told from what the template writes.
        behind = [i for i in generated if before.get(i, (None, ""))[0] == i - 1] or [i for i in generated if i > 0]
        if not behind:
            return ""
        first = behind[0]
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


TAGS = "mark the model's part in the template with {% generation %} ... {% endgeneration %}"
LOST = f"cannot tell where the chat template puts it, so nothing says what would be trained; {TAGS}"


def _behind_the_only(needle: str, text: str, low: int, high: int) -> int | None:
    """Where the only occurrence of `needle` in `text[low:high]` ends, None when it is blank, absent or repeated."""
    if not needle.strip() or text.count(needle, low, high) != 1:
        return None
    return text.index(needle, low, high) + len(needle)


def _between(text: str) -> dict[int, tuple[int | None, str]]:
    """For every message with a placeholder in `text`: the one before it, and the text between the two."""
    found: dict[int, tuple[int | None, str]] = {}
    previous, at = None, 0
    for mark in MARK.finditer(text):
        number = int(mark[2])
        found.setdefault(number, (previous, text[at : mark.start()]))
        previous, at = number, mark.end()
    return found


def _marked(message: dict[str, Any], i: int) -> dict[str, Any]:
    """A message with marks around what is said in it and behind the names of the tools it calls.

    Marks go inside of leading and trailing blanks, which templates often cut off.
    """
    marked = dict(message)
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        marked["content"] = _around(content, i, True, True)
    elif isinstance(content, list):
        spoken = [k for k, part in enumerate(content) if _text(part).strip()]
        marked["content"] = [
            _replace_text(part, _around(_text(part), i, k == spoken[0], k == spoken[-1])) if k in spoken else part
            for k, part in enumerate(content)
        ]
    if not _text_of(message).strip():
        thoughts = [key for key in SAID if key != "content" and _text(message.get(key)).strip()]
        marked.update({key: _around(message[key], i, False, True) for key in thoughts})
    if message.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(call, i) for call in message["tool_calls"]]
    return marked


def _around(text: str, i: int, begin: bool, end: bool) -> str:
    core = text.strip()
    at = text.index(core)
    opening, closing = (f"{BEGIN}{i}{CLOSE}" if begin else ""), (f"{END}{i}{CLOSE}" if end else "")
    return text[:at] + opening + core + closing + text[at + len(core) :]


def _marked_call(call: Any, i: int) -> Any:
    inner = call.get("function") if isinstance(call, dict) else None
    if isinstance(inner, dict):
        return {**call, "function": _marked_call(inner, i)}
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        return {**call, "name": f"{call['name']}{END}{i}{CLOSE}"}
    return call


def _holds(text: str, message: dict[str, Any]) -> bool:
    """Whether the names of the tools that a message calls stand in `text`, one behind the other."""
    for call in message.get("tool_calls") or ():
        inner = call.get("function", call) if isinstance(call, dict) else None
        name = inner.get("name") if isinstance(inner, dict) else None
        if isinstance(name, str):
            _, found, text = text.partition(name)
            if not found:
                return False
    return True


def _text(part: Any) -> str:
    text = part.get("text", "") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _replace_text(part: Any, text: str) -> Any:
    return {**part, "text": text} if isinstance(part, dict) else text


def _texts(message: dict[str, Any]) -> Iterator[str]:
    for key in SAID:
        value = message.get(key)
        yield from (_text(part) for part in value) if isinstance(value, list) else (_text(value),)


def _text_of(message: dict[str, Any]) -> str:
    """The text of the content, parts joined."""
    value = message.get("content")
    return "".join(map(_text, value)) if isinstance(value, list) else _text(value)


def _said(message: dict[str, Any]) -> bool:
    return any(text.strip() for text in _texts(message))


def _leading_blank(message: dict[str, Any]) -> str:
    text = _text_of(message)
    return text[: len(text) - len(text.lstrip())]


def _trailing_blank(message: dict[str, Any]) -> str:
    text = _text_of(message)
    return text[len(text.rstrip()) :]


def _name(chat: Conversation, i: int) -> str:
    return f"message {i + 1} ({chat.messages[i]['role']})"
