"""stdout and stderr that may lose their reader: `| head`, Ctrl-C on `| tee`, a closed terminal, a full disk."""

from __future__ import annotations

import io
import os
import select
import sys


class _Lossy(io.FileIO):
    """A descriptor whose writes never fail: what cannot be written is dropped."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            while (written := super().write(data)) is None:  # non-blocking (another program set that) and full
                select.select([], [self], [])
            return written
        except OSError:
            return memoryview(data).nbytes


class _Unbuffered(io.BufferedWriter):
    def write(self, data: bytes) -> int:  # type: ignore[override]
        count = super().write(data)
        self.flush()
        return count


def open_closed() -> None:
    """A stream that was closed from the start leads nowhere, rather than into the next file that is opened."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def keep_writing(*names: str) -> None:
    """From now on `sys.stdout` or `sys.stderr` drops what it cannot write; one that was replaced stays as it is."""
    open_closed()
    for name in names:
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        raw = _Lossy(stream.fileno(), "w", closefd=False)
        kept = io.TextIOWrapper(
            _Unbuffered(raw) if stream.write_through else io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, kept)
        setattr(sys, f"__{name}__", kept)
