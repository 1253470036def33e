"""Opening input files that may be compressed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron.errors import UserError

COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")


def ending_of(path: Path) -> str:
    """A file's last extension, in lower case: `.JSONL` is `.jsonl`."""
    return path.suffix.lower()


@contextmanager
def open_input(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """The decompressed content of a file, and a function that returns how many of its bytes on disk are consumed.

    Raises `UserError` naming the file when it is missing, damaged or cut short.
    """
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    try:
        with path.open("rb") as raw:
            ending = ending_of(path)
            if ending in COMPRESSIONS and path.is_file() and not path.stat().st_size:
                raise EOFError("the file is empty; a compressed file never is")
            position = raw.tell if raw.seekable() else int  # a named pipe has no position: 0
            if ending == ".zst":
                zstandard = _zstandard(path)
                errors = (*errors, zstandard.ZstdError)
                yield io.BufferedReader(_ZstdStream(raw, zstandard.ZstdDecompressor())), position
            elif ending in (".gz", ".xz", ".bz2"):
                opener: Any = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}[ending]
                with opener(raw, "rb") as file:
                    yield file, position
            else:
                yield raw, position
    except errors as error:
        raise UserError(f"{path}: cannot be read: {error or type(error).__name__}") from error


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path}: needs zstandard: pip install zstandard") from error
    return zstandard


class _ZstdStream(io.RawIOBase):
    """The content of a zstd file of any number of frames (tools that append write several).

    The library's own stream reader does not report a truncated file; this one raises `EOFError`.
    """

    def __init__(self, raw: IO[bytes], decompressor: Any) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._frame: Any = None  # None between two frames
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._raw.read(1 << 17)
            if not block:
                if self._frame is not None:
                    raise EOFError("the file is cut short")
                return 0
            self._ready = memoryview(b"".join(self._decompress(block)))
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self, block: bytes) -> Iterator[bytes]:
        while block:
            self._frame = self._frame or self._decompressor.decompressobj()
            yield self._frame.decompress(block)
            block = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
