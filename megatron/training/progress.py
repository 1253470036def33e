"""What a rank's main thread is doing, and how long: set there, read by its watchdog and by what reports on the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The phases of a step, in their order.
PHASES = ("reading data", "training", "callbacks")
# Seconds for what is not a step: data, checkpoints, evaluations, callbacks, and the first two steps (compilation).
SLOW_SECONDS = 3600.0


class Progress:
    """The loop enters phases; what takes long beats in between (micro-batches, parameters that are saved).

    Attributes:
        step: the step that is under way; the first is 1.
        first: the step with which this start of the run began.
        phase: one of `PHASES`.
        count: signs of progress so far.
        step_seconds: what the last step took, its data included.
        longest_pause: between two steps so far (an evaluation, a checkpoint).
        save_seconds: what the last checkpoint took; None when none was written.
        stop_seconds: what a stop takes at most, from the request to the complete checkpoint; None when not known.
        activity: what takes long between two steps: "evaluation", "checkpoint", or else "training".
        listeners: called at each of them, in the main thread.
    """

    def __init__(self) -> None:
        self.step, self.first, self.phase, self.count = 0, 0, PHASES[0], 0
        self.step_seconds, self.longest_pause, self._began = 0.0, 0.0, time.monotonic()
        self.save_seconds: float | None = None
        self.stop_seconds: float | None = None
        self.activity = "training"
        self.listeners: list[Callable[[], None]] = []

    def enter(self, phase: str, step: int) -> None:
        """A phase of this step begins."""
        self.step, self.phase, self.first = step, phase, self.first or step
        now = time.monotonic()
        if phase == PHASES[0]:
            self.longest_pause = max(self.longest_pause, now - self._began) if step > self.first else 0.0
            self._began = now
        elif phase == PHASES[2]:
            self.step_seconds = now - self._began
            self._began = now
        self.beat()

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """What the loop does meanwhile; a sign of progress at its start and its end."""
        before, self.activity = self.activity, activity
        self.beat()
        try:
            yield
        finally:
            self.activity = before
        self.beat()

    def discount(self, seconds: float) -> None:
        """So many of the last seconds are no part of a pause: whoever used them leaves at once when asked to stop."""
        self._began += seconds

    def beat(self) -> None:
        """A sign of progress."""
        self.count += 1
        for listener in self.listeners:
            listener()
