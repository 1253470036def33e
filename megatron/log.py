"""Messages for people: rank-0 logging on stderr, said-once notes, progress of long work.

Messages go to stderr, results to stdout.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_ROOT = "deepy"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; call it as `get_logger(__name__)`."""
    return logging.getLogger(f"{_ROOT}.{name.removeprefix('megatron.')}")


def configure(rank: int = 0, level: str = "INFO") -> None:
    """Set up logging for this process: rank 0 speaks from `level` up, the others from WARNING up with their rank.

    Calling it again replaces the earlier set-up.
    """
    root = logging.getLogger(_ROOT)
    root.handlers.clear()
    root.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    root.addHandler(handler)
    root.setLevel(getattr(logging, level.upper(), logging.INFO) if rank == 0 else logging.WARNING)


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
