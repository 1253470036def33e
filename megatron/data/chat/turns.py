"""Where the trained turns of a chat are in its rendering, as spans of characters.

A template with `{% generation %}` tags marks them itself. For all others they are derived, without assuming that the
rendering of the first messages is a prefix of the rendering of all (not so if a template drops earlier reasoning):

* The chat is rendered again with marks around the content of every message. Without the marks this must equal the plain
  rendering; then the marks show where each content is, whatever the template did to it.
* The chat is rendered once with placeholders instead of contents: the text in between is what the template writes
  around a message. The part of it up to the end of the generation prompt is the header of a turn.
* The last turn shows what ends a turn.

So a turn starts at the end of its header, where a model begins to write, and ends with its end-of-turn token. A
position that cannot be proven is an error that names the message, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.data.chat.contents import choose_form
from megatron.data.chat.conversation import BadChat, Conversation
from megatron.data.chat.marks import (
    BEGIN,
    CLOSE,
    END,
    Places,
    content_text,
    has_text,
    leading_blank,
    mark,
    read_marks,
    trailing_blank,
)
from megatron.data.chat.skeleton import Skeleton, SkeletonMaker
from megatron.data.chat.template import ChatTemplate
from megatron.data.chat.written import CALLS, CONTENT, Span, Written, cut, has_content, is_content_lost

TAGS = "mark the model's part in the template with {% generation %} ... {% endgeneration %}"
LOST = f"its position in the rendering is unknown, so it cannot be trained; {TAGS}"


@dataclass(frozen=True)
class Turn:
    """Message `number` (counted from 0) is trained from character `start` to before `end` of the rendering."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class Rendered:
    """The text of a chat and its trained turns, in order and without overlap.

    `lost`: what of the messages the template did not write or the turns do not cover, one entry per message and field.
    """

    text: str
    turns: tuple[Turn, ...]
    lost: tuple[str, ...] = ()


class TurnFinder:
    """Renders chats and finds the turns of the generation roles in them.

    Args:
        template: the chat template.
        roles: whose turns are trained.
        added_tokens: tokens that are never part of plain text (`<|im_end|>`); the first one after a turn ends it.
        only_last: only the last turn of these roles is trained.
        leave_open: the chat ends with its last content, without an end of turn, to be continued.
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
        """The rendering of `chat` and the turns to train. Raises `BadChat`, naming the message if possible."""
        form = choose_form(self.template, chat)
        chat, text, written = form.chat, form.text, form.written
        generated = [i for i, m in enumerate(chat.messages) if m["role"] in self.roles and i >= chat.prompt]
        generated = generated[-1:] if self.only_last else generated
        written.require_calls(generated)
        text = self.template.render(chat, leave_open=True) if self.leave_open else text
        # The tags mark the assistant's turns; `transformers` does not support them in a chat that is left open.
        tagged = self.template.is_tagged(chat) and self.roles == ("assistant",) and not self.leave_open
        turns = (
            self._tagged_turns(chat, form.spans, generated)
            if tagged
            else self._derived_turns(chat, text, generated, written)
        )
        return Rendered(text, turns, tuple(self._losses(chat, text, turns, generated, written, tagged)))

    def _derived_turns(self, chat: Conversation, text: str, generated: list[int], written: Written) -> tuple[Turn, ...]:
        if not generated:
            return ()
        skeleton, places = self._skeletons.of(chat), self._places(chat, text)
        turns, low = [], 0
        for i in generated:
            turn = self._turn(i, chat, text, skeleton, places, low, written)
            if turn.end > turn.start:
                turns.append(turn)
                low = turn.end
        return tuple(turns)

    def _tagged_turns(self, chat: Conversation, spans: list[Span], generated: list[int]) -> tuple[Turn, ...]:
        if not generated:
            return ()
        if generated[0] > 0 and (self.only_last or chat.prompt):
            # Each turn has the same number of tags in whatever part of the chat it is rendered.
            _, earlier = self.template.render_tagged(replace(chat, messages=chat.messages[: generated[0]]))
            spans = spans[len(earlier) :]
        turns = tuple(Turn(generated[0], start, end) for start, end in spans if end > start)
        if not turns and any(has_text(chat.messages[i]) or chat.messages[i].get(CALLS) for i in generated):
            raise BadChat(f"{_name(chat, generated[0])}: it is outside the template's {{% generation %}} tags")
        return turns

    def _losses(
        self, chat: Conversation, text: str, turns: Sequence[Turn], generated: list[int], written: Written, tagged: bool
    ) -> Iterator[str]:
        """What of the messages is not written, or not trained although it should be. Raises `BadChat` for an answer of
        which nothing is written: its end would be trained alone."""
        spans = [(turn.start, turn.end) for turn in turns]
        trained = cut(text, spans)
        yield from (key for _, key in written.missing)
        for (i, key), field in written.found.items():
            if i in generated and not field.is_inside(text, spans):
                yield f"{key} (written, but not trained)"
        for i, message in enumerate(chat.messages):
            if has_content(trained if i in generated else text, message):
                continue
            if i in generated and has_content(text, message):
                yield f"{CONTENT} (written, but not trained)"
                continue
            alone = not any(number == i for number, _ in written.found)
            if tagged and i in generated and alone and is_content_lost(self.template, chat, text, i):
                raise BadChat(f"{_name(chat, i)}: the chat template does not write its content")
            yield f"{CONTENT} (or a part of it)"

    # ---- one turn

    def _turn(
        self,
        i: int,
        chat: Conversation,
        text: str,
        skeleton: Skeleton,
        places: Places,
        low: int,
        written: Written,
    ) -> Turn:
        message = chat.messages[i]
        text_found, calls = has_text(message), bool(message.get("tool_calls"))
        end = len(text) if self._is_open(i, chat) else self._end(i, chat, text, skeleton, places)
        high = self._begin_of_next(i, places, len(text)) if end is None else end
        start = self._start(i, chat, text, skeleton, places, low, high)
        if start is None and not calls and not text_found:
            return Turn(i, low, low)  # the template omits an answer without content, or its header
        begin = places.begins.get(i)
        lost = end is None and text_found and not calls
        if lost or start is None or start < low or (begin is not None and start > begin):
            raise BadChat(f"{_name(chat, i)}: {LOST}")
        if self._is_open(i, chat):
            return Turn(i, start, len(text))
        if calls or (text_found and not content_text(message).strip()):  # more may follow the marked text
            called = written.found.get((i, CALLS))
            known = (called.ends if called is not None else None) or ()
            at = max(start if end is None else end, *known, 0)
            stop = self._end_of_call(i, text, skeleton, at, places)
            if stop is None or (called is not None and not called.is_inside(text, [(start, stop)])):
                raise BadChat(f"{_name(chat, i)}: its end in the rendering is unknown; {TAGS}")
            return Turn(i, start, stop)
        return self._with_ending(i, message, text, skeleton, places, Turn(i, start, start if end is None else end))

    def _with_ending(
        self, i: int, message: dict[str, Any], text: str, skeleton: Skeleton, places: Places, turn: Turn
    ) -> Turn:
        """The turn with its end-of-turn text; `turn` ends with its content, perhaps without trailing blanks."""
        ending = skeleton.endings.get(i, "")
        blank = trailing_blank(message)
        tails = (blank + ending, ending, blank) if ending.strip() or has_text(message) else ()
        tail = next((t for t in tails if text.startswith(t, turn.end)), "")
        stop = turn.end + len(tail)
        places.ends.setdefault(i, stop - len(ending) if tail.endswith(ending) else stop)  # helps to find the next one
        if has_text(message) and not ending and not text[stop:].strip():
            stop = len(text)  # only the eos that will be appended ends it
        return replace(turn, end=stop)

    def _is_open(self, i: int, chat: Conversation) -> bool:
        return self.leave_open and i == len(chat.messages) - 1

    def _end(self, i: int, chat: Conversation, text: str, skeleton: Skeleton, places: Places) -> int | None:
        """Where the text of message `i` ends, None when unknown."""
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
        """Where the header of turn `i` ends, None when unknown."""
        if i not in skeleton.before:
            return _end_of_only(skeleton.prompt, text, low, high)
        header, inserted = skeleton.header(i)
        at = header.rfind(skeleton.prompt) if skeleton.prompt.strip() else -1
        own = header[at:] if at >= 0 else header
        # Its header may precede its content ...
        begin = places.begins.get(i)
        for blank in (leading_blank(chat.messages[i]), ""):
            if begin is not None and text.endswith(own + inserted + blank, low, begin):
                return begin - len(inserted) - len(blank)
        # ... or follow the content of the previous message ...
        previous = skeleton.before[i][0]
        known = 0 if previous is None else places.ends.get(previous)
        between = "" if previous is None else trailing_blank(chat.messages[previous])
        for blank in (between, ""):
            if known is not None and text.startswith(blank + header, known):
                return known + len(blank + header)
        # ... and if neither is known, there must be only one such header.
        return _end_of_only(own, text, low, high)

    def _begin_of_next(self, i: int, places: Places, default: int) -> int:
        after = [at for marks in (places.begins, places.ends) for j, at in marks.items() if j > i]
        return min(after, default=default)

    def _end_of_call(self, i: int, text: str, skeleton: Skeleton, at: int, places: Places) -> int | None:
        high = self._begin_of_next(i, places, len(text))
        for ending in (skeleton.call_ending, skeleton.endings.get(i, "")):
            if ending.strip() and (found := text.find(ending, at, high)) >= 0:
                return found + len(ending)
        return None

    # ---- where contents are

    def _places(self, chat: Conversation, text: str) -> Places:
        """Positions of the contents in `text`. A message that cannot be marked without changing `text` has none."""
        if any(point in text for point in (BEGIN, END, CLOSE)):
            raise BadChat("it has the reserved code points U+FDD0..U+FDD2")
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


def _end_of_only(needle: str, text: str, low: int, high: int) -> int | None:
    """The end of the only `needle` in `text[low:high]`, None when it is blank, missing or repeated."""
    if not needle.strip() or text.count(needle, low, high) != 1:
        return None
    return text.index(needle, low, high) + len(needle)


def _name(chat: Conversation, i: int) -> str:
    return f"message {i + 1} ({chat.messages[i]['role']})"
