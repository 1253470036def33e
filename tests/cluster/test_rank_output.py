"""What is kept of a rank's output for the report."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megatron.cluster.rank_output import RankOutput

pytestmark = pytest.mark.cpu


def output(text: str, **options: object) -> RankOutput:
    read_fd, write_fd = os.pipe()
    os.write(write_fd, text.encode())
    os.close(write_fd)
    made = RankOutput(1, read_fd, **{"straight": False, "log_file": Path("/dev/null"), **options})
    while made.pump():
        continue
    return made


TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: boom'


def test_the_tail_starts_at_the_last_traceback() -> None:
    noise = "\n".join(f"line {i}" for i in range(50))
    assert output(f"{TRACE}\n{noise}\n{TRACE}\nbye\n").tail() == f"{TRACE}\nbye"


def test_a_chain_of_exceptions_is_kept_whole() -> None:
    for link in ("During handling of the above exception, another", "The above exception was the direct cause"):
        chain = f"{TRACE}\n\n{link}...\n\n{TRACE}"
        assert output(f"before\n{chain}\n").tail() == chain


def test_torch_s_rank_prefix_is_understood() -> None:
    trace = "\n".join(f"[rank1]: {line}" for line in TRACE.splitlines())
    assert output(f"before\n{trace}\n").tail() == trace


def test_without_a_traceback_it_is_the_last_lines_and_of_a_progress_bar_its_last_state() -> None:
    text = "\n".join(f"line {i}" for i in range(100)) + "\n 10%\r 50%\r100%\nunfinished"
    lines = output(text).tail().splitlines()
    assert lines[-3:] == ["line 99", "100%", "unfinished"] and len(lines) == 30


def test_what_our_bars_draw_is_left_out() -> None:
    drawn = "\r\r 10%\n\r\r below\x1b[A\r\r 20%\r      \rsaved\n\r\r 20%\n\r     \x1b[A\r\r 30%\n"
    assert output(f"before\n{drawn}after\n").tail() == "before\nsaved\nafter"


def test_a_line_on_the_console_names_its_rank_once(capfd: pytest.CaptureFixture[str]) -> None:
    output("[rank 1] named\nraw\n[rank 2] quoted\n", log_file=None)
    assert capfd.readouterr().err == "[rank 1] named\n[rank 1] raw\n[rank 1] [rank 2] quoted\n"


def test_a_log_that_cannot_be_written_is_reported_and_does_not_stop_the_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    made = output("one\ntwo\n", log_file=tmp_path / "file" / "rank_1.log")
    assert made.tail() == "one\ntwo"
    err = capfd.readouterr().err
    assert re.search(r"/rank_1\.log, .*rank 1: ", err) and "[rank 1] two" in err
