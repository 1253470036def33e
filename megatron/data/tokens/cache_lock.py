"""A lock between processes, also of several machines, that kill -9 does not leave behind.

`flock` where the file system has it: the system itself frees it when its holder dies. Elsewhere (Lustre mounted
without `flock`, some NFS servers) a file that its holder touches every few seconds: a waiting
process that sees it untouched for long enough removes it. Each measures by its own clock, so clocks may differ.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.log import get_logger

LOGGER = get_logger(__name__)

BEAT = 2.0  # seconds between two touches by the holder
SILENCE = 30.0  # seconds without a touch after which the holder counts as dead
_POLL = 0.02


@contextmanager
def hold_lock(path: Path, done: Callable[[], bool], what: str) -> Iterator[bool]:
    """Hold the lock file at `path`, or wait until `done()`; `what` ("to build x") is said while waiting.

    Yields True when this process holds the lock, False when another was done first or when no lock can be made here
    (then every process does the work). The file is removed once `done()`.
    """
    try:
        file = path.open("a")
    except OSError:  # another user's file, or a folder that is full: work without a lock
        yield False
        return
    with file:
        held: bool | None = None
        with suppress(OSError):  # no flock on this file system
            held = _wait(lambda: _flock(file.fileno()), done, what)
        if held is None:
            with _hold_by_touching(path.with_suffix(".beat"), done, what) as beating:
                yield beating
        else:
            yield held
        # Processes that still wait on the removed file find the work done.
        if done():
            path.unlink(missing_ok=True)


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(acquire: Callable[[], bool], done: Callable[[], bool], what: str) -> bool:
    announced, start = False, time.monotonic()
    while not acquire():
        if done():
            return False
        waited = time.monotonic() - start
        if not announced and waited > 5:
            announced = True
            LOGGER.info(f"waiting for another process {what}")
        time.sleep(_POLL if waited < 5 else 0.5)
    return True


@contextmanager
def _hold_by_touching(path: Path, done: Callable[[], bool], what: str) -> Iterator[bool]:
    """The lock without `flock`: the process that creates the file holds it while it touches the file."""
    watch = _Watch(path)
    if not _wait(watch.acquire, done, what):
        yield False
        return
    stop = threading.Event()

    def touch() -> None:
        while not stop.wait(BEAT):
            with suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=touch, name="build lock", daemon=True)
    thread.start()
    try:
        yield True
    finally:
        stop.set()
        thread.join()
        path.unlink(missing_ok=True)


class _Watch:
    """Creates the file, or watches whether its owner still touches it."""

    def __init__(self, path: Path) -> None:
        self.path, self._seen, self._since = path, -1, time.monotonic()

    def acquire(self) -> bool:
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            self._look()
            return False
        return True

    def _look(self) -> None:
        try:
            touched = self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return
        now = time.monotonic()
        if touched != self._seen:
            self._seen, self._since = touched, now
        elif now - self._since > SILENCE:
            # Of several that find it dead one renames it; the others then see no file, or the new one of a new holder.
            grave = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            with suppress(FileNotFoundError):
                os.rename(self.path, grave)
                grave.unlink(missing_ok=True)
            self._since = now
