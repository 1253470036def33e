"""Waiting when the Hugging Face Hub says "too many requests" (HTTP 429), and only then."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.errors import UserError
from megatron.log import get_logger

Result = TypeVar("Result")

TRIES = 10
FIRST_WAIT, LONGEST_WAIT = 300.0, 600.0  # seconds; GPT-NeoX's fork waits as long
# A client that hides the answer still writes it out; a bare 429 may be part of a name.
RATE_LIMITED = re.compile(r"\b429\b.{0,20}too many requests|too many requests.{0,20}\b429\b|error:? 429\b", re.I)

logger = get_logger(__name__)


@dataclass(frozen=True)
class Backoff:
    """Repeats what was refused with 429, at most `tries` times in all; every other error is raised at once.

    Before try n + 1 it waits as long as the answer asks (`Retry-After`, or `t=` of `RateLimit`), else
    min(300 · 2^(n-1), 600) seconds, with `sleep`.
    """

    sleep: Callable[[float], None] = time.sleep
    tries: int = TRIES

    def __call__(self, what: str, action: Callable[[], Result]) -> Result:
        """The result of `action`. Raises its error, and `UserError` after the last refusal."""
        for attempt in range(1, self.tries + 1):
            try:
                return action()
            # The clients' exceptions are a long and changing list; only a 429 is handled here.
            except Exception as error:
                if not is_rate_limited(error):
                    raise
                if attempt == self.tries:
                    raise UserError(
                        f"{what}: the Hub still answers 429 (too many requests) after {attempt} tries. Run the same "
                        "command later to resume, log in (`hf auth login`), or lower --download-workers"
                    ) from error
                wait = retry_after(error)
                wait = min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT) if wait is None else wait
                logger.warning(f"{what}: too many requests (try {attempt} of {self.tries}), waiting {wait:.0f} s")
                self.sleep(wait)
        raise AssertionError("unreachable: the last try returns or raises")


def is_rate_limited(error: BaseException) -> bool:
    """Whether an HTTP answer 429 caused `error`."""
    for link in _chain(error):
        status = getattr(getattr(link, "response", None), "status_code", None) or getattr(link, "status", None)
        if status == 429 or (status is None and RATE_LIMITED.search(str(link))):
            return True
    return False


def retry_after(error: BaseException) -> float | None:
    """The seconds that the refusal asks to wait, None if it does not say."""
    for link in _chain(error):
        response = getattr(link, "response", None)
        headers: Any = getattr(response, "headers", None) or getattr(link, "headers", None)
        if not headers:
            continue
        if (seconds := _seconds(headers.get("Retry-After"))) is not None:
            return seconds
        # RateLimit of the IETF draft, which the Hub sends: `"api";r=0;t=55`
        if found := re.search(r"\bt=(\d+)", headers.get("RateLimit") or ""):
            return float(found[1])
    return None


def _seconds(value: str | None) -> float | None:
    """`Retry-After` is a number of seconds or a date."""
    if not value:
        return None
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    from email.utils import parsedate_to_datetime

    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
