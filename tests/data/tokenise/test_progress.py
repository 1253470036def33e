"""The progress display of a tokenisation, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
import sys

import pytest

from megatron import log
from megatron.data.tokenise.encode import Tally
from megatron.data.tokenise.progress import TallyProgress

pytestmark = pytest.mark.cpu


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(log, "time", fake)
    return fake


def tally(documents: int, nbytes: int, tokens: int) -> Tally:
    return Tally([documents], [tokens], [0], [0], nbytes=nbytes)


def test_share_rates_and_time_left(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="deepy"), TallyProgress("tokenising", 40_000_000) as progress:
        clock.now += 10
        progress(tally(500, 10_000_000, 2_000_000))
        clock.now += 80
    assert caplog.messages == [
        "tokenising: 25%|##        | ETA 0:30, 500 docs (50 docs/s), 1.0 MB/s, 2000000 tokens (2.00e+05 tokens/s)",
        "tokenising: done in 1:30, 500 docs (6 docs/s), 0.1 MB/s, 2000000 tokens (2.22e+04 tokens/s)",
    ]


def test_the_number_of_documents_given_is_the_goal(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    progress = TallyProgress("tokenising", 1, num_docs=20_000)
    clock.now += 100
    with caplog.at_level("INFO", logger="deepy"):
        progress(tally(200, 10_000_000, 1))
    assert caplog.messages[0].startswith("tokenising: 1%|          | ETA 2:45:00, 200 docs (2 docs/s)")


def test_updates_keep_their_distance(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    progress = TallyProgress("tokenising", None, log_interval=100)
    with caplog.at_level("INFO", logger="deepy"):
        for documents, seconds in ((50, 9), (120, 9), (250, 1), (260, 9), (300, 9)):
            clock.now += seconds
            progress(tally(documents, 1, 1))
    assert [message.split(" docs")[0] for message in caplog.messages] == ["tokenising: 120", "tokenising: 260"]


def test_a_failure_logs_no_end(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("INFO", logger="deepy"),
        pytest.raises(RuntimeError),
        TallyProgress("tokenising", 1) as progress,
    ):
        progress(tally(1, 1, 1))
        raise RuntimeError
    assert caplog.messages == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_speeds_and_time_left(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with TallyProgress("tokenising", 40_000_000) as progress:
        clock.now += 10
        progress(tally(500, 10_000_000, 2_000_000))
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "tokenising:  25%" in shown
    assert "10.0M/40.0M" in shown
    assert re.search(r"\[\d\d:\d\d<\d\d:\d\d,", shown)  # time gone < time left
    assert "500 docs (50 docs/s), 1.0 MB/s, 2000000 tokens (2.00e+05 tokens/s)" in shown
