"""What a long tokenisation shows: share done, MB/s, documents/s, tokens/s, time left."""

from __future__ import annotations

import copy
import sys
import time
from typing import Any

from megatron.data.tokenise.encode import Tally
from megatron.log import get_logger

LINE_SECONDS = 5.0  # at most one plain line in this time, and one redraw of the bar in a fiftieth of it

logger = get_logger(__name__)


class EncodeProgress:
    """A bar on a terminal, plain lines elsewhere. Call it with the running totals; close it at the end.

    Args:
        total_bytes: size of the input on disk, None when unknown.
        num_docs: expected number of documents; the share done and the time left go by it when it is given.
        log_interval: smallest number of documents between two updates.
        earlier: what an earlier run had done that this one continues: done, but not in this one's time.
    """

    def __init__(
        self,
        total_bytes: int | None,
        *,
        num_docs: int | None = None,
        log_interval: int = 100,
        earlier: Tally | None = None,
    ) -> None:
        self._goal, self._by_docs = (num_docs, True) if num_docs else (total_bytes, False)
        self._interval = log_interval
        self._earlier = copy.deepcopy(earlier) if earlier else Tally.zero(1)
        self._start = self._shown_at = time.monotonic()
        self._shown_docs = 0
        self._tally: Tally | None = None
        self._bar = self._make_bar() if sys.stderr.isatty() else None

    def __enter__(self) -> EncodeProgress:
        return self

    def __exit__(self, failure: Any, *rest: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if failure is None and self._tally is not None:
            logger.info(f"tokenising: done in {_clock(self._seconds())}, {self._rates(self._tally)}")

    def __call__(self, tally: Tally) -> None:
        """Show the running totals, when enough happened since the last time."""
        self._tally = tally
        now, docs = time.monotonic(), max(tally.documents)
        pause = LINE_SECONDS if self._bar is None else LINE_SECONDS / 50
        if docs - self._shown_docs < self._interval or now - self._shown_at < pause:
            return
        self._shown_docs, self._shown_at = docs, now
        done = docs if self._by_docs else tally.nbytes
        if self._bar is not None:
            self._bar.set_postfix_str(self._rates(tally), refresh=False)
            self._bar.update(done - self._bar.n)
        else:
            logger.info(f"tokenising: {self._share(done)}{self._rates(tally)}")

    def _make_bar(self) -> Any:
        from tqdm import tqdm

        unit = "doc" if self._by_docs else "B"
        options = {"unit": unit, "unit_scale": True, "dynamic_ncols": True, "initial": self._before()}
        return tqdm(total=self._goal, desc="tokenising", **options)

    def _before(self) -> int:
        return max(self._earlier.documents) if self._by_docs else self._earlier.nbytes

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def _share(self, done: int) -> str:
        if not self._goal or not done:
            return ""
        left = self._seconds() * max(self._goal - done, 0) / max(done - self._before(), 1)
        return f"{100 * min(done / self._goal, 1):.0f} %, ETA {_clock(left)}, "

    def _rates(self, tally: Tally) -> str:
        docs, seconds, earlier = max(tally.documents), self._seconds(), self._earlier
        return (
            f"{docs} docs ({(docs - max(earlier.documents)) / seconds:.0f} docs/s), "
            f"{(tally.nbytes - earlier.nbytes) / seconds / 1e6:.1f} MB/s, "
            f"{(sum(tally.tokens) - sum(earlier.tokens)) / seconds:.2e} tokens/s"
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
