"""What a rank's main thread does where others wait for it, in words: for the thread that reports who is awaited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Doing:
    """Written by the main thread, read by another one.

    Attributes:
        what: "loading the checkpoint of step 100"; empty for nothing in particular.
        detail: how far it is with that: "layers.12.attention.query.weight"; empty if nobody says.
        meetings: how many times it has come to where ranks wait for each other; equal numbers are the same place.
        waits_since: since when it waits there (`time.monotonic`); None while it does not.
    """

    def __init__(self) -> None:
        self.what = self.detail = ""
        self.meetings = 0
        self.waits_since: float | None = None

    def __str__(self) -> str:
        return f"{self.what} ({self.detail})" if self.what and self.detail else self.what

    @contextmanager
    def now(self, what: str) -> Iterator[None]:
        """Inside, the rank does this."""
        before, self.what, self.detail = (self.what, self.detail), what, ""
        try:
            yield
        finally:
            self.what, self.detail = before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the rank waits for the others: a place that all come to, in the same order."""
        self.meetings += 1
        self.waits_since = time.monotonic()
        try:
            yield
        finally:
            self.waits_since = None
