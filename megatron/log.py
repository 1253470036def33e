"""Messages for people: rank-0 logging on stderr, said-once notes, progress of long work.

Messages go to stderr, results to stdout.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_ROOT = "deepy"
_RESULTS = "deepy.results"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; call it as `get_logger(__name__)`."""
    return logging.getLogger(f"{_ROOT}.{name.removeprefix('megatron.')}")


def configure(rank: int = 0, level: str = "INFO", file: Path | None = None) -> None:
    """Set up logging for this process: rank 0 speaks from `level` up, the others from WARNING up with their rank.

    `file` takes the messages and results of every rank from `level` up, with the time. Calling it again replaces the
    earlier set-up.
    """
    root, wanted = logging.getLogger(_ROOT), getattr(logging, level.upper(), logging.INFO)
    for old in root.handlers:
        old.close()
    root.handlers.clear()
    root.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    handler.setLevel(wanted if rank == 0 else logging.WARNING)
    # A result is on stdout already.
    handler.addFilter(lambda record: record.name != _RESULTS)
    root.addHandler(handler)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        into = logging.FileHandler(file, encoding="utf-8", delay=True)
        into.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        root.addHandler(into)
    root.setLevel(wanted if rank == 0 or file is not None else logging.WARNING)


@contextmanager
def only_errors() -> Iterator[None]:
    """Say nothing below an error meanwhile: for checks whose warnings are said again by what follows."""
    root = logging.getLogger(_ROOT)
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


class Once:
    """Says each message a single time: `once = Once(logger); once.info("...")`."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self._said: set[str] = set()

    def info(self, message: str) -> None:
        self._say(logging.INFO, message)

    def warning(self, message: str) -> None:
        self._say(logging.WARNING, message)

    def _say(self, level: int, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self.logger.log(level, message)


def progress(items: Iterable[T], *, what: str, total: int | None = None, unit: str = "it") -> Iterator[T]:
    """Iterate with a progress bar on a terminal, and plain lines with percentages (about every 10 s) elsewhere."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(items, desc=what, total=total, unit=unit, dynamic_ncols=True)
        return
    logger, start, last = get_logger("progress"), time.monotonic(), time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - last >= 10:
            last = now
            share = f" ({100 * done / total:.0f} %)" if total else ""
            logger.info(f"{what}: {done} {unit}{share}, {done / (now - start):.1f} {unit}/s")


def result(line: str) -> None:
    """Print one line of a command's result (a training or evaluation line, a table) on stdout, at once."""
    print(line, flush=True)
    logging.getLogger(_RESULTS).info(line)
