"""The signals that ask a process to stop, and what they do before there is anything to save."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from megatron.errors import StopRequested
from megatron.streams import open_closed

# Ctrl-C, kill and schedulers, a closed terminal, Ctrl-\, schedulers' warnings.
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

# Processes write their Python stacks to stderr: `kill -URG PID`. Whatever else gets it ignores it.
DUMP_SIGNAL = signal.SIGURG


def name_signal(number: int) -> str:
    """What the user calls it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Install `handler` for the stop signals; returns the handlers before, by number.

    An ignored SIGHUP stays ignored: that is what nohup is for.
    """
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    heeded = [number for number in STOP_SIGNALS if not (nohup and number == signal.SIGHUP)]
    return {number: signal.signal(number, handler) for number in heeded}


def raise_stop_requests() -> None:
    """A stop signal raises `StopRequested`: while nothing is trained yet, so that nothing is lost."""
    handle_stop_signals(_raise)


def lose_at_stop() -> None:
    """Training begins: a stop signal for which nobody saves loses steps, and ends a run with code 128 + its number."""
    give_back({number: _raise for number in STOP_SIGNALS if signal.getsignal(number) is _raise}, complete=False)


def give_back(handlers: dict[int, Any], *, complete: bool) -> None:
    """Install the handlers that `handle_stop_signals` returned, by number; but not those of a run's start, which is
    over: until it exits, a run that is `complete` ignores the signal, another one loses what it has not saved."""
    for number, handler in handlers.items():
        late = signal.SIG_IGN if complete else _lose
        signal.signal(number, late if handler is _raise else handler)


def _raise(number: int, frame: FrameType | None) -> None:
    raise StopRequested(_text(number))


def _text(number: int) -> str:
    again = "the same command starts again, from the newest checkpoint if there is one"
    return f"{name_signal(number)}: stopped before its first step; {again}"


def _lose(number: int, frame: FrameType | None) -> None:
    text = f"{name_signal(number)}: ended at once; what was trained since the last checkpoint is lost"
    _exit(text, 128 + number)


def _exit(text: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # a killed launcher no longer reads
        os.write(2, f"{text}\n".encode())
    os._exit(code)


class ExitAtStop:
    """A stop signal ends the process at once, with exit code 3, until somebody else handles stop signals.

    For the imports and the rendezvous, in which an exception might be caught by others and a handler might wait for
    minutes: Python calls it in the main thread, between two instructions, but tells this class's thread at once.
    Processes that are forked have the default handlers: their signals are not this process's, and end them.
    """

    def __init__(self) -> None:
        open_closed()
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
        self._grace = 0.0
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._handle(lambda number, frame: None)
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._watch, name="exit-at-stop", daemon=True).start()

    def allow(self, seconds: float) -> None:
        """From now on it raises `StopRequested`, and ends the process only when that takes longer than `seconds`."""
        self._grace = seconds
        self._handle(_raise)

    def _handle(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler = handler
        handle_stop_signals(handler)

    def _forget(self) -> None:
        """In a forked child: it shares the pipe, and has not got the thread."""
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) in (self._handler, _raise, _lose):
                signal.signal(number, signal.SIG_DFL)

    def _watch(self) -> None:
        while byte := os.read(self._reading, 1):
            handler = signal.getsignal(byte[0]) if byte[0] in STOP_SIGNALS else None
            if handler is self._handler:
                time.sleep(self._grace)
                _exit(_text(byte[0]), StopRequested.exit_code)
            elif handler is _lose:
                _lose(byte[0], None)
