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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.data.chat.conversation import BadChat, Conversation
from megatron.data.chat.marks import (
    BEGIN,
    CLOSE,
    END,
    Places,
    content_text,
    is_said,
    leading_blank,
    mark,
    read_marks,
    trailing_blank,
)
from megatron.data.chat.skeleton import Skeleton, SkeletonMaker
from megatron.data.chat.template import ChatTemplate

TAGS = "mark the model's part in the template with {% generation %} ... {% endgeneration %}"
LOST = f"cannot tell where the chat template puts it, so nothing says what would be trained; {TAGS}"


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
        self._skeletons = SkeletonMaker(template, roles, added_tokens)

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
        skeleton, places = self._skeletons.of(chat), self._places(chat, text)
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
        if not turns and any(is_said(chat.messages[i]) for i in generated):
            raise BadChat(f"{_name(chat, generated[0])}: the template's {{% generation %}} tags leave it out")
        return Rendered(text, turns)

    # ---- one turn

    def _turn(self, i: int, chat: Conversation, text: str, skeleton: Skeleton, places: Places, low: int) -> Turn:
        message = chat.messages[i]
        said, calls = is_said(message), bool(message.get("tool_calls"))
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
        if calls or (said and not content_text(message).strip()):  # more may follow what is marked
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
        blank = trailing_blank(message)
        tails = (blank + ending, ending, blank) if ending.strip() or is_said(message) else ()
        tail = next((t for t in tails if text.startswith(t, turn.end)), "")
        stop = turn.end + len(tail)
        places.ends.setdefault(i, stop - len(ending) if tail.endswith(ending) else stop)  # the next may be found by it
        if is_said(message) and not ending and not text[stop:].strip():
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
        for blank in (leading_blank(chat.messages[following]), ""):
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
        for blank in (leading_blank(chat.messages[i]), ""):
            if begin is not None and text.endswith(own + inserted + blank, low, begin):
                return begin - len(inserted) - len(blank)
        # ... or behind the content of the message before it ...
        previous = skeleton.before[i][0]
        known = 0 if previous is None else places.ends.get(previous)
        between = "" if previous is None else trailing_blank(chat.messages[previous])
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
        if any(point in text for point in (BEGIN, END, CLOSE)):
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
        messages = [mark(m, i) if i in which else m for i, m in enumerate(chat.messages)]
        try:
            marked = self.template.render(replace(chat, messages=messages), leave_open=self.leave_open)
        except BadChat:
            return None
        plain, places = read_marks(marked)
        return places if plain == text else None


def _behind_the_only(needle: str, text: str, low: int, high: int) -> int | None:
    """Where the only occurrence of `needle` in `text[low:high]` ends, None when it is blank, absent or repeated."""
    if not needle.strip() or text.count(needle, low, high) != 1:
        return None
    return text.index(needle, low, high) + len(needle)


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


def _name(chat: Conversation, i: int) -> str:
    return f"message {i + 1} ({chat.messages[i]['role']})"
