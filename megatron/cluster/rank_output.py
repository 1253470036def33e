"""What ranks print: rank 0 straight through, the others prefixed or into a log file, the end of each for reports."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import sys
import termios
import time
import tty
from collections import deque
from pathlib import Path

from megatron.log import BAR_MARK

# At the end of a line: what a bar of ours drew, or spaces over it; one below another bar goes back to that.
_BAR = re.compile(rb"\r(%b[^\r]*|\s*(\x1b\[A)?)$" % BAR_MARK.encode())
_TAIL_LINES = 200
_SHOWN_LINES = 30
_NOTED_LINES = 50
_TRACEBACK = re.compile(r"(\[rank\d+\]: )?Traceback \(most recent call last\)")  # torch puts the rank in front
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


class RankOutput:
    """The reading end of one rank's messages.

    `straight`: bytes go to our stderr as they come (progress bars work); else whole lines go to `log_file` if there is
    one, else to our stderr with the rank in front. The log file is opened at the first line.
    A line that matches `failure_line` sets `reported` to the number in its first group; `noted` keeps the first lines
    that match `noted_line`.
    """

    def __init__(
        self,
        rank: int,
        read_fd: int,
        *,
        straight: bool,
        log_file: Path | None,
        failure_line: re.Pattern[bytes] | None = None,
        noted_line: re.Pattern[bytes] | None = None,
    ) -> None:
        self.rank = rank
        self.read_fd = read_fd
        self.straight = straight
        self.last_write = 0.0  # time.monotonic() of the last bytes shown on the console
        self.reported: int | None = None
        self.noted: list[str] = []
        self._failure_line = failure_line
        self._noted_line = noted_line
        self._path = log_file
        self._log: int | None = None
        self._partial = b""
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)

    def pump(self) -> bool:
        """Read what is there; False at the end of the stream. Call it only when the descriptor is readable."""
        try:
            data = os.read(self.read_fd, 1 << 16)
        except OSError:  # a pseudo-terminal reports EIO where a pipe reports the end
            data = b""
        if not data:
            self.close()
            return False
        if self.straight:
            self._console(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line)
        return True

    def close(self) -> None:
        """Flush an unfinished line and close the descriptors."""
        if self._partial:
            self._line(self._partial)
            self._partial = b""
        for fd in (self.read_fd, self._log):
            if fd is not None and fd >= 0:
                os.close(fd)
        self.read_fd, self._log = -1, None

    def tail(self) -> str:
        """The end of the output: from the start of the last (chain of) traceback, else the last lines."""
        lines = [line.decode("utf-8", "replace") for line in self._tail]
        starts = [i for i, line in enumerate(lines) if _TRACEBACK.match(line)]
        if not starts:
            return "\n".join(lines[-_SHOWN_LINES:])
        start = starts.pop()
        while starts and any(text in line for text in _CHAINED for line in lines[max(0, start - 3) : start]):
            start = starts.pop()
        return "\n".join(lines[start:])

    def _line(self, line: bytes) -> None:
        line = line.rstrip(b"\r")
        if _BAR.search(line):
            return
        line = line.rsplit(b"\r", 1)[-1]  # of somebody else's progress bar keep the last state
        self._tail.append(line)
        if self.reported is None and self._failure_line and (match := self._failure_line.search(line)):
            self.reported = int(match[1])
        if self._noted_line and len(self.noted) < _NOTED_LINES and self._noted_line.search(line):
            self.noted.append(line.decode("utf-8", "replace"))
        if self._path is not None:
            self._write_log(self._path, line)
        elif not self.straight:
            name = b"[rank %d] " % self.rank  # which our own messages have already
            self._console(name + line.removeprefix(name) + b"\n")

    def _write_log(self, path: Path, line: bytes) -> None:
        try:
            if self._log is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.write(self._log, f"--- started {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())
            os.write(self._log, line + b"\n")
        except OSError as error:  # a full disk must not end the training run: log it and continue without the file
            path, self._path = self._path, None
            self._console(f"cannot write {path}, the log of rank {self.rank}: {error}\n".encode())

    def _console(self, data: bytes) -> None:
        self.last_write = time.monotonic()
        with contextlib.suppress(OSError):  # nobody reads our stderr any more; the job continues
            sys.stderr.flush()
            _write_all(2, data)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def open_channel(terminal: bool) -> tuple[int, int]:
    """(reading end, writing end) for a rank's stderr: a pseudo-terminal if our own stderr is a terminal and
    `terminal` asks for it, so that the rank still sees one and draws progress bars; else a pipe."""
    if not (terminal and os.isatty(2)):
        return os.pipe()
    read_fd, write_fd = pty.openpty()
    tty.setraw(write_fd)  # no translation of line ends on the way
    with contextlib.suppress(OSError):
        fcntl.ioctl(write_fd, termios.TIOCSWINSZ, fcntl.ioctl(2, termios.TIOCGWINSZ, b"\0" * 8))
    return read_fd, write_fd
