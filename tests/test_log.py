"""Progress of long work, where there is no terminal, and results."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from megatron import log
from megatron.log import ProgressBar, progress

pytestmark = pytest.mark.cpu


class Clock:
    now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Clock]:
    fake = Clock()
    monkeypatch.setattr(log, "time", fake)
    with caplog.at_level("INFO", logger="deepy"):
        yield fake


def test_items_with_a_length(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for _ in progress(["a", "b", "c", "d"], what="reading", unit="files"):
        clock.now += 4
    assert caplog.messages == [
        "reading: 50%|#####     | ETA 0:08, 2 files, 0.2 files/s",
        "reading: 100%|##########| ETA 0:00, 4 files, 0.2 files/s",
    ]


def test_items_without_a_length(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for _ in progress(iter("ab"), what="reading"):
        clock.now += 5
    assert caplog.messages == ["reading: 1 it, 0.2 it/s", "reading: 2 it, 0.2 it/s"]


def test_bytes_after_an_earlier_part(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """What was done before counts in the share, not in speed and time left."""
    with ProgressBar("joining", 400_000_000, "B", before=100_000_000) as bar:
        clock.now += 10
        bar(100_000_000)
    assert caplog.messages == ["joining: 50%|#####     | ETA 0:20, 200.0 MB, 10.0 MB/s"]


def test_short_work_that_people_wait_for_shows_its_end(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with ProgressBar("evaluating", 2, "tasks", ends=True) as bar:
        bar(1)
        clock.now += 1
        bar(1)
    assert caplog.messages == ["evaluating: 100%|##########| ETA 0:00, 2 tasks, 2.0 tasks/s"]


def test_a_line_of_a_result_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are unbuffered: between two writes of a line, one of the launcher's could come."""

    class Pieces(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    pieces: list[str] = []
    monkeypatch.setattr("sys.stdout", Pieces())
    log.result("a line")
    assert [piece for piece in pieces if piece] == ["a line\n"]
