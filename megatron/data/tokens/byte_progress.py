"""What long copying shows: share done, MB/s, time left."""

from __future__ import annotations

import sys
import time
from typing import Any

from megatron.log import get_logger

LINE_SECONDS = 5.0

logger = get_logger(__name__)


class ByteProgress:
    """A bar on a terminal, plain lines elsewhere. Call it with the size of every piece done."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._start = self._shown_at = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, dynamic_ncols=True)

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, nbytes: int) -> None:
        """That many bytes more are done."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
            return
        now = time.monotonic()
        if now - self._shown_at >= LINE_SECONDS:
            self._shown_at = now
            rate = self._done / (now - self._start)
            left = (self._total - self._done) / rate
            share = 100 * self._done // max(self._total, 1)
            logger.info(f"{self._what}: {share} %, {rate / 1e6:.0f} MB/s, ETA {left:.0f} s")
