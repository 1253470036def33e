"""A chat template is somebody else's program: it gets so much time and memory for a chat, and no more.

The template runs in transformers' sandbox, which bounds neither. Both limits end in an error that names the template.
"""

from __future__ import annotations

import ctypes
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

from megatron.errors import UserError

SECONDS = 10.0  # for one chat, of the process's own time; real templates take less than a thousandth
MEMORY = 2 << 30  # bytes on top of what the process has
_LAST_RESORT = (
    3  # times SECONDS: a single operation, 9 ** 9 ** 9, cannot be interrupted; then the system ends the process
)


class TooMuch(UserError):
    """The error for a template that reached a limit; not one of a single chat, so no chat is skipped for it."""


@contextmanager
def limits(template: str) -> Iterator[None]:
    """Bound what runs inside. `template`: its name in messages.

    Memory is bounded in the main thread only (the limit is the whole process's), and on Linux. Raises `TooMuch`.
    """
    main = threading.current_thread() is threading.main_thread()
    timer = _signal_after if main else _interrupt_after
    try:
        with _bounded_memory() if main and sys.platform == "linux" else nullcontext(), timer(SECONDS, template):
            yield
    except MemoryError as error:
        raise TooMuch(
            f"{template} takes more than {MEMORY >> 30} GiB of memory for one chat; use another one"
        ) from error


def _too_slow(template: str) -> TooMuch:
    return TooMuch(f"{template} takes more than {SECONDS:g} s for one chat, as if it never ended; use another one")


@contextmanager
def _signal_after(seconds: float, template: str) -> Iterator[None]:
    """Raise in the main thread. Timers of processor time: others use that of the clock."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _too_slow(template)

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_PROF, _LAST_RESORT * seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)  # again, should the first be lost in a callback
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _interrupt_after(seconds: float, template: str) -> Iterator[None]:
    """The same for another thread, which no signal reaches."""
    thread, lock, done = threading.get_ident(), threading.Lock(), False

    def stop() -> None:
        with lock:
            if not done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Stopped))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    except _Stopped as error:
        raise _too_slow(template) from error
    finally:
        with lock:
            done = True
        timer.cancel()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)  # what has not arrived yet


class _Stopped(Exception):
    """What is thrown into another thread: only a class can be."""


@contextmanager
def _bounded_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb", buffering=0) as file:
        wanted = int(file.read(64).split()[0]) * resource.getpagesize() + MEMORY
    if soft != resource.RLIM_INFINITY and soft <= wanted:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
