"""A chat template is somebody else's program: it gets so much time and memory for a chat, and no more.

The template runs in transformers' sandbox, which bounds neither. Both limits end in an error that names the template.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from megatron.errors import UserError

SECONDS = 10.0  # for one chat, of the process's own time; real templates take less than a thousandth
MEMORY = 2 << 30  # bytes on top of what the process has
_LAST_RESORT = 3  # times SECONDS: a single operation (9 ** 9 ** 9) is not interrupted; the system ends the process then


class TooMuch(UserError):
    """The error for a template that reached a limit; not one of a single chat, so no chat is skipped for it."""


def limits(template: str) -> AbstractContextManager[None]:
    """Bound what runs inside. `template`: its name in messages.

    Memory is bounded in the main thread only (the limit is the whole process's), and on Linux. Raises `TooMuch`.
    """
    main = threading.current_thread() is threading.main_thread()
    return _bound_main_thread(template) if main else _bound_thread(template)


def _too_slow(template: str) -> TooMuch:
    return TooMuch(f"{template} takes more than {SECONDS:g} s for one chat, as if it never ended; use another one")


@contextmanager
def _bound_main_thread(template: str) -> Iterator[None]:
    """One generator with all steps, because its cost counts for every chat. Its timers are of processor time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _too_slow(template)

    before, memory = signal.signal(signal.SIGVTALRM, stop), _bound_memory()
    signal.setitimer(signal.ITIMER_PROF, _LAST_RESORT * SECONDS)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, 1.0)  # again, should the first be lost in a callback
    try:
        yield
    except MemoryError as error:
        raise TooMuch(
            f"{template} takes more than {MEMORY >> 30} GiB of memory for one chat; use another one"
        ) from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGVTALRM, before)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, memory)


def _bound_memory() -> tuple[int, int] | None:
    """Bound the process's address space. Returns the limits to restore; None when they were narrower already."""
    if sys.platform != "linux":
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = _process_size(int(time.monotonic()), os.getpid()) + MEMORY
    if soft != resource.RLIM_INFINITY and soft <= wanted:
        return None
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    return soft, hard


@functools.lru_cache(maxsize=1)
def _process_size(second: int, pid: int) -> int:
    """Bytes of this process's address space, asked once a second: it costs as much as half a rendering."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(64).split()[0]) * resource.getpagesize()


class _Stopped(Exception):
    """What is thrown into another thread: only a class can be."""


@contextmanager
def _bound_thread(template: str) -> Iterator[None]:
    """The time limit for a thread that no signal reaches."""
    thread, lock, done = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def stop() -> None:
        with lock:
            if not done:
                interrupt(thread, ctypes.py_object(_Stopped))

    timer = threading.Timer(SECONDS, stop)
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
        interrupt(thread, None)  # what has not arrived yet
