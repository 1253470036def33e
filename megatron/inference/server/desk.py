"""Where orders come in, from any thread, and tokens go out: rank 0's part of the decoding."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from megatron.errors import DeepyError
from megatron.inference.server.decoder import Decoder, NewToken, Order
from megatron.inference.stage import Stage
from megatron.inference.team import Control, Team

Hear = Callable[[NewToken | None], None]
"""Called in the decoding thread with each token of an order; None: the server ends, there will be no more."""

GRACE = 10.0  # seconds that texts get to be finished when the server is to end


class Full(DeepyError):
    """There are too many orders already, or the server ends."""


@dataclass
class _Work:
    """What is told to one copy of the model before its next token."""

    orders: list[Order]
    dropped: list[int]


class Desk:
    """Deals orders to the copies of the model: `size` texts at a time each, the others wait, `most_waiting` of them."""

    def __init__(self, control: Control, stage: Stage, decoder: Decoder, size: int, most_waiting: int) -> None:
        self.stage, self.decoder, self.size, self.most_waiting = stage, decoder, size, most_waiting
        self.team = Team(control, stage, {"step": self._step})
        self._inbox: SimpleQueue[Order | int | None] = SimpleQueue()
        self._numbers = itertools.count()
        self._waiting: deque[Order] = deque()
        self._heard: dict[int, Hear] = {}
        self._open: list[set[int]] = [set() for _ in range(stage.copy[1])]
        self._dropped: set[int] = set()
        self._deadline: float | None = None

    def submit(self, order: Order, hear: Hear) -> int:
        """Have a text written; its number. Raises `Full`."""
        if self._deadline is not None:
            raise Full("the server is about to end")
        if len(self._heard) >= self.most_waiting + self.size * len(self._open):
            raise Full(f"{self.most_waiting} texts are waiting already; try again later")
        number = next(self._numbers)
        self._heard[number] = hear
        self._inbox.put(replace(order, number=number))
        return number

    def cancel(self, number: int) -> None:
        """Nobody waits for this text any more."""
        self._inbox.put(number)

    def stop(self) -> None:
        """End `lead` soon; from any thread, or a signal handler."""
        self._inbox.put(None)

    def lead(self) -> None:
        """On rank 0, inside `team.run`: until `stop`, all texts' tokens."""
        while True:
            self._read_inbox()
            if self._deadline is not None and (not self._heard or time.monotonic() > self._deadline):
                break
            for answers in self.team.ask("step", self._deal(), {}):
                for token in answers:
                    self._hand_on(token)
        for hear in list(self._heard.values()):
            hear(None)

    def _read_inbox(self) -> None:
        """All that came in; waits for something when there is nothing to do."""
        while True:
            try:
                item = self._inbox.get(block=self._is_idle())
            except Empty:
                return
            if item is None:
                self._deadline = self._deadline or time.monotonic() + GRACE
            elif isinstance(item, int):
                if self._heard.pop(item, None) is not None:
                    self._dropped.add(item)
            else:
                self._waiting.append(item)

    def _is_idle(self) -> bool:
        return not self._waiting and not any(self._open) and self._deadline is None

    def _deal(self) -> list[_Work]:
        """What each copy is told: an order goes to the one that writes the fewest texts."""
        work = [_Work([], sorted(open_ & self._dropped)) for open_ in self._open]
        for open_ in self._open:
            open_ -= self._dropped
        while self._waiting and min(map(len, self._open)) < self.size:
            order = self._waiting.popleft()
            if order.number not in self._dropped:
                copy = min(range(len(self._open)), key=lambda i: len(self._open[i]))
                work[copy].orders.append(order)
                self._open[copy].add(order.number)
            self._dropped.discard(order.number)
        self._dropped &= {order.number for order in self._waiting}
        return work

    def _hand_on(self, token: NewToken) -> None:
        hear = self._heard.get(token.number)
        if token.finish is not None:
            self._heard.pop(token.number, None)
            for open_ in self._open:
                open_.discard(token.number)
        if hear is not None:
            hear(token)

    def _step(self, items: Sequence[_Work], options: Mapping[str, Any]) -> list[list[NewToken]]:
        """On every rank: the next tokens of this copy."""
        (work,) = items
        return [self.decoder.step(work.orders, work.dropped)]
