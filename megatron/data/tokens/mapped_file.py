"""A large file mapped for reading small pieces anywhere in it.

Training reads a few kilobytes here and there. The system assumes the start of a long read and reads ahead, on
many machines 8 MiB and more per piece (measured: 8 ms for a cold piece of 2 KB, against 0.2 ms without; on a network
file system it also costs everyone's bandwidth). So pieces come from a mapping without read-ahead, and longer ones are
requested at once before they are touched.
"""

from __future__ import annotations

import errno
import mmap
import resource
from pathlib import Path

import numpy as np

from megatron.errors import UserError

_AT_ONCE = 4 * mmap.PAGESIZE  # bytes above which a piece is requested before it is touched


class MappedFile:
    """`size` bytes of a file from `offset` on (to its end by default), mapped for reading."""

    def __init__(self, path: str | Path, offset: int = 0, size: int | None = None) -> None:
        self.path, self.offset = Path(path), offset
        self.size = self.path.stat().st_size - offset if size is None else size
        self._map = map_file(self.path) if self.size else None
        self._bytes = _view(self._map)
        self._advises = self._map is not None and hasattr(mmap, "MADV_RANDOM")
        if self._map is not None and self._advises:
            self._map.madvise(mmap.MADV_RANDOM)

    def read(self, start: int, size: int) -> np.ndarray:
        """Bytes `[start, start + size)`: uint8 `[size]`, a read-only view."""
        start += self.offset
        if size > _AT_ONCE and self._advises and self._map is not None:
            page = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, page, start + size - page)
        return self._bytes[start : start + size]

    def whole(self) -> np.ndarray:
        """All of it, uint8 `[size]`, for reading from start to end: its own mapping, kept as long as the array."""
        return _view(map_file(self.path) if self.size else None)[self.offset : self.offset + self.size]


def map_file(path: Path) -> mmap.mmap:
    """Map a file that is not empty, for reading."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if (reason := too_many_open(path, error)) is not None:
            raise reason from error
        raise


def too_many_open(path: Path, error: OSError) -> UserError | None:
    """The error when a file cannot be opened because too many are; None when that is not the reason."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return UserError(f"{path}: this process has too many files open. Raise the limit: ulimit -n 65536.")


def allow_open_files(more: int) -> None:
    """Raise this process's own limit of open files, as far as it may, when `more` are about to be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = more + 512  # for everything else
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _view(mapped: mmap.mmap | None) -> np.ndarray:
    return np.frombuffer(mapped, np.uint8) if mapped is not None else np.empty(0, np.uint8)
