"""Calls to the Hub that are tried again when the Hub is busy, and what may be shown of their errors.

The client tries some of its calls a few times within half a minute (checking files, sending large ones, listing),
others never (making a repository or a branch, reading a revision, and a commit where Xet is off). Around all of them
stands this: it waits for minutes or hours, as long as the Hub says when it says so.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from megatron.errors import DeepyError, MachineError, UserError
from megatron.log import get_logger
from megatron.secrets import hide_secrets

T = TypeVar("T")

logger = get_logger(__name__)

RESUMES = "What was sent is kept: the same command goes on from there"
TIMEOUT = 600.0  # seconds without a byte from the Hub or to it, after which a connection counts as lost
_CONFLICT = 412  # the branch has moved
_BUSY = (408, _CONFLICT, 425, 429)
_FIRST_CONFLICT = 2.0  # seconds: a branch that has moved is read again soon, nobody asked for a pause
_LONGEST = 24 * 3600.0  # seconds that the Hub may ask for


@dataclass(frozen=True)
class Retry:
    """How often, and after how many seconds, a call is tried again.

    Without a word from the Hub the n-th wait is drawn from `min_wait` to `min_wait * 2**n`, at most `max_wait`, so that
    many jobs that were refused at once do not come back at once. Raises `UserError` for numbers that cannot be.
    """

    max_retries: int = 20
    min_wait: float = 120.0
    max_wait: float = 3600.0

    def __post_init__(self) -> None:
        if self.max_retries < 0 or not 0 <= self.min_wait <= self.max_wait < 1e9:
            raise UserError(
                "--max-retries must be at least 0, and --retry-min-wait between 0 and --retry-max-wait: "
                f"{self.max_retries}, {self.min_wait:g} and {self.max_wait:g}"
            )

    def call(self, function: Callable[..., T], *args: Any, what: str, **options: Any) -> T:
        """The result of `function(*args, **options)`; `what`, for messages: `uploading A to B`.

        Raises `UserError` when the Hub refuses it, or a file cannot be read, and `MachineError` when it still fails
        after the last try.
        """
        prepare_client()
        with _second_interrupt_kills(what):
            return self._call(function, args, options, what)

    def _call(self, function: Callable[..., T], args: tuple[Any, ...], options: dict[str, Any], what: str) -> T:
        from huggingface_hub import get_session

        for failures in range(1, self.max_retries + 2):
            try:
                get_session().timeout = TIMEOUT  # the client has none; it makes a new session after some errors
                return function(*args, **options)
            except DeepyError:
                raise
            except Exception as error:
                reason = first_line(error)
                if not is_transient(error):
                    if not _is_refusal(error):
                        raise  # a bug
                    raise UserError(f"{what} failed: {reason}. {_advice(error)}") from error
                asked = asked_wait(error)
                if failures > self.max_retries or asked > _LONGEST:
                    tries = f"{self.max_retries} retries" if asked <= _LONGEST else f"a request to wait {asked:.0f} s"
                    raise MachineError(f"{what} failed, after {tries}: {reason}. {RESUMES}.") from error
                seconds = self._seconds(failures, asked, _status(error))
            logger.warning(
                f"{what}: {reason}. Waiting {_duration(seconds)}, then retry {failures} of {self.max_retries}"
            )
            time.sleep(seconds)
        raise AssertionError("the last try returns or raises")

    def _seconds(self, failures: int, asked: float, status: int | None) -> float:
        """How long to wait after so many failures; `asked`: the seconds that the Hub named, 0 when it named none."""
        if asked:
            return asked + random.uniform(0, 1 + asked / 10)  # never less, and not all at the same moment
        least = min(_FIRST_CONFLICT, self.min_wait) if status == _CONFLICT else self.min_wait
        return random.uniform(least, min(self.max_wait, least * 2.0**failures))


def retry_of(given: argparse.Namespace) -> Retry:
    """As the flags of an upload ask (`add_upload_flags`)."""
    return Retry(given.max_retries, given.retry_min_wait, given.retry_max_wait)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later: the Hub is busy or broken, a branch moved, a connection was lost."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    connection_lost = HfHubHTTPError.__mro__[1]  # of the HTTP library, which differs between versions of the client
    if (status := _status(error)) is not None:
        return status in _BUSY or status >= 500
    return any(
        isinstance(each, connection_lost | ConnectionError | TimeoutError)
        and not isinstance(each, OfflineModeIsEnabled | BrokenPipeError)
        for each in _chain(error)
    )


def asked_wait(error: BaseException) -> float:
    """Seconds that the Hub wants to pass before the next call; 0 when it does not say."""
    response = _response(error)
    if response is None:
        return 0.0
    limit = re.search(r"\br=0\b.*?\bt=(\d+)", response.headers.get("ratelimit", ""))  # "api";r=0;t=55
    waits = [] if limit is None else [float(limit[1])]
    after = response.headers.get("Retry-After", "").strip()
    if after.isdigit():
        waits.append(float(after))
    elif after:
        try:
            waits.append(parsedate_to_datetime(after).timestamp() - time.time())
        except ValueError:
            logger.debug(f"Retry-After is neither seconds nor a date: {after}")
    return max([0.0, *waits])


def first_line(error: BaseException) -> str:
    """What an error of a client says, and the server behind it, without the full stop and without secrets."""
    texts = [str(error), *(text for each in _chain(error) if (text := getattr(each, "server_message", None)))]
    lines = [next((line.strip().rstrip(".:") for line in text.splitlines() if line.strip()), "") for text in texts]
    return redact(": ".join(dict.fromkeys(line for line in lines if line))) or type(error).__name__


def redact(text: str) -> str:
    """`text` without the token in use, whatever it looks like, and without other secrets."""
    from huggingface_hub import get_token

    token = get_token()
    return hide_secrets(text.replace(token, "***") if token else text)


def prepare_client() -> None:
    """Redact the client's own warnings, which quote addresses with signatures; have it log how far a folder is where it
    draws no bar."""
    if not sys.stderr.isatty():
        logging.getLogger("huggingface_hub._upload_pipeline").setLevel(logging.INFO)  # two lines a minute
    for handler in logging.getLogger("huggingface_hub").handlers:
        if _redact_record not in handler.filters:
            handler.addFilter(_redact_record)


@contextmanager
def _second_interrupt_kills(what: str) -> Iterator[None]:
    """Ctrl-C ends a wait at once, but the client's threads finish the files that they send: a second one ends those."""
    own_thread = threading.current_thread() is threading.main_thread()
    if not own_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        logger.warning(f"{what}: stopping, when files on their way are sent; Ctrl-C again ends at once. {RESUMES}.")
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _redact_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = redact(record.getMessage()), ()
    return True


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes: what fails in a thread of the client arrives wrapped."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__


def _response(error: BaseException) -> Any:
    return next((r for each in _chain(error) if (r := getattr(each, "response", None)) is not None), None)


def _status(error: BaseException) -> int | None:
    """Of the answer that the error is about. Xet's store names it in a text only; 401 there is a token of an hour."""
    if (response := _response(error)) is not None:
        return getattr(response, "status_code", None)
    found = next((m for each in _chain(error) if (m := re.search(r"HTTP status \w+ error \((\d{3})", str(each)))), None)
    return None if found is None or found[1] == "401" else int(found[1])


def _is_refusal(error: BaseException) -> bool:
    """Whether an error that stays is for the user: an answer of the Hub, a file, a text that the client refuses."""
    return _status(error) is not None or any(isinstance(each, OSError | ValueError) for each in _chain(error))


def _advice(error: BaseException) -> str:
    """What to do about an error that stays."""
    return {
        401: "The token is wrong or missing: `hf auth login`, or set HF_TOKEN",
        403: "The token needs the right to write to this repository, and private storage has a limit",
        404: "There is no such repository or revision, or the token may not see it",
    }.get(_status(error) or 0, "Nothing local was changed") + "."


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds, 1) if seconds < 60 else round(seconds), 60)
    return f"{minutes:.0f} min {rest:.0f} s" if minutes else f"{rest:g} s"
