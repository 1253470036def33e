"""Waiting for the Hub: how long, how often, and for what not."""

from __future__ import annotations

import email.utils
import time

import pytest

from megatron.data.hub.retry import Backoff, is_rate_limited, retry_after
from megatron.errors import UserError

pytestmark = pytest.mark.cpu


class Answer:
    """What HTTP clients hang on their exceptions."""

    def __init__(self, status_code: int, headers: dict[str, str]) -> None:
        self.status_code, self.headers = status_code, headers


class HTTPError(OSError):
    def __init__(self, status: int, headers: dict[str, str] | None = None, said: str = "refused") -> None:
        super().__init__(said)
        self.response = Answer(status, headers or {})


class Service:
    """Fails with the errors given, one per call, then answers."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def backoff() -> tuple[Backoff, list[float]]:
    waits: list[float] = []
    return Backoff(waits.append), waits


def test_waits_grow_to_ten_minutes() -> None:
    """min(300 * 2^(n-1), 600) seconds before try n + 1."""
    again, waits = backoff()
    assert again("x", Service(*(HTTPError(429) for _ in range(4)))) == "answer"
    assert waits == [300, 600, 600, 600]


def test_ten_tries_then_a_message_that_says_what_to_do() -> None:
    again, waits = backoff()
    service = Service(*(HTTPError(429) for _ in range(20)))
    with pytest.raises(UserError, match=r"me/data: .*429.*\b10\b.*--download-workers"):
        again("me/data", service)
    assert (service.calls, len(waits)) == (10, 9)


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": "1000"}, 1000),
        ({"RateLimit": '"api";r=0;t=55'}, 55),
        ({"Retry-After": "soon"}, 300),
        ({}, 300),
    ],
)
def test_the_answer_says_how_long(headers: dict[str, str], wait: float) -> None:
    again, waits = backoff()
    again("x", Service(HTTPError(429, headers)))
    assert waits == [wait]


def test_the_answer_may_name_a_date() -> None:
    date = email.utils.formatdate(time.time() + 90, usegmt=True)
    wait = retry_after(HTTPError(429, {"Retry-After": date}))
    assert wait is not None
    assert 80 < wait <= 90


@pytest.mark.parametrize(
    "error",
    [
        HTTPError(503),
        HTTPError(404, said="404 Client Error: https://hub/datasets/me/too-429-many"),
        FileNotFoundError("Dataset me/corpus-429 doesn't exist"),
        ValueError("429 rows are too few"),
    ],
)
def test_nothing_else_is_tried_again(error: BaseException) -> None:
    again, waits = backoff()
    service = Service(error)
    with pytest.raises(type(error)):
        again("x", service)
    assert (service.calls, waits) == (1, [])


def test_a_refusal_is_seen_behind_other_errors() -> None:
    """The clients wrap answers; sometimes only the text is left."""
    try:
        try:
            raise HTTPError(429, {"Retry-After": "3"})
        except HTTPError as error:
            raise FileNotFoundError("cannot find the file") from error
    except FileNotFoundError as error:
        wrapped = error
    assert is_rate_limited(wrapped)
    assert retry_after(wrapped) == 3
    assert is_rate_limited(RuntimeError("429 Client Error: Too Many Requests for url: https://hub/x"))
    assert is_rate_limited(RuntimeError("HTTP status client error (429 Too Many Requests)"))
