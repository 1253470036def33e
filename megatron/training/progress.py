"""What a rank's main thread is doing, and how long: set there, read by its watchdog and by what reports on the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time

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
        step_seconds: what the last step took that is done, its data included: from its begin, or from the end of the
            one before where the device was still busy with that.
        seconds_in_steps: of all steps that are done.
        longest_pause: between two steps so far (an evaluation, a checkpoint).
        save_seconds: what the last checkpoint took; None when none was written.
        stop_seconds: what a stop takes at most, from the request to the complete checkpoint; None when not known.
        activity: what takes long between two steps: "evaluation", "checkpoint", or else "training".
        pauses: how many times the loop did something else.
        began: the checkpoint to start from is being loaded, or the loop has begun.
        spent: by phase, how long it has been in it, and how long the processor worked in this thread.
        listeners: called at each of them, in the main thread.
    """

    def __init__(self) -> None:
        self.step, self.first, self.phase, self.count = 0, 0, PHASES[0], 0
        self.step_seconds, self.seconds_in_steps, self.longest_pause = 0.0, 0.0, 0.0
        self._began = self._since = time.monotonic()
        self._under_way = 0
        self._entered = (self._began, thread_time())
        self.spent: dict[str, list[float]] = {phase: [0.0, 0.0] for phase in PHASES}
        self.save_seconds: float | None = None
        self.stop_seconds: float | None = None
        self.activity = "training"
        self.pauses = 0
        self.began = False
        self.listeners: list[Callable[[], None]] = []

    def enter(self, phase: str, step: int) -> None:
        """A phase of this step begins."""
        now, busy = time.monotonic(), thread_time()
        spent = self.spent[self.phase]
        spent[0] += now - self._entered[0]
        spent[1] += busy - self._entered[1]
        self._entered = (now, busy)
        self.step, self.phase, self.first = step, phase, self.first or step
        if phase == PHASES[0]:
            self.longest_pause = max(self.longest_pause, now - self._began) if step > self.first else 0.0
            if self._under_way == 0:
                self._since = now
        elif phase == PHASES[1]:
            self._under_way += 1
        else:
            self._began = now
        self.beat()

    def complete(self) -> None:
        """The device has done the earliest step under way."""
        now = time.monotonic()
        self.step_seconds = now - self._since
        self._since = self._began = now
        self.seconds_in_steps += self.step_seconds
        self._under_way -= 1

    def abandon(self) -> None:
        """No step is under way any more, and the loop begins anew: who listens says so again (hook `loaded`)."""
        self._under_way = 0
        self.listeners.clear()
        self._began = self._since = time.monotonic()

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """What the loop does meanwhile; a sign of progress at its start and its end."""
        before, self.activity = self.activity, activity
        self.pauses += 1
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
