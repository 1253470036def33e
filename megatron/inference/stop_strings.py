"""Texts that end a generated text, wherever its tokens begin and end, and the text as it is shown while it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.errors import UserError

# A token more than a stop string has bytes, and some for tokens of which several make one character.
_LOOK_BACK = 4
_INCOMPLETE = "\ufffd"  # what bytes are decoded to that are not a whole character yet


class StopStrings:
    """`decode`: the text of new tokens. Raises `UserError` for an empty stop string, which would end every text."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        if "" in stops:
            raise UserError("stop_strings: one is empty; leave it out")
        self.stops, self.decode = tuple(stops), decode
        self._tail = max((len(stop.encode()) for stop in self.stops), default=0) + _LOOK_BACK

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether the last tokens end the text."""
        tail = self.decode(tokens[-self._tail :]) if self.stops else ""
        return any(stop in tail for stop in self.stops)

    def cut(self, text: str) -> str:
        """What is before each of the stop strings."""
        for stop in self.stops:
            text = text.partition(stop)[0]
        return text

    def open(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a stop string."""
        longest = max(map(len, self.stops), default=0)
        lengths = range(min(longest - 1, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)


class GrowingText:
    """A text while it is generated: hands on what is sure to be in it, and never takes anything back.

    Args:
        show: takes each new piece; all of them together begin the finished text.
    """

    def __init__(self, stops: StopStrings, show: Callable[[str], None]) -> None:
        self.stops, self.show = stops, show
        self.shown = ""

    def grew(self, tokens: Sequence[int]) -> None:
        """`tokens`: all new tokens so far."""
        text = self.stops.decode(tokens)
        whole = self.stops.cut(text)
        if whole == text:
            whole = whole.rstrip(_INCOMPLETE)
            whole = whole[: len(whole) - self.stops.open(whole)]
        if whole.startswith(self.shown) and len(whole) > len(self.shown):
            self.show(whole[len(self.shown) :])
            self.shown = whole
