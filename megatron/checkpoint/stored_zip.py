"""A file that is written once from front to back with its CRC-32, and zip archives in it, each byte checked once.

A zip archive wants the CRC-32 of every record, a manifest that of the whole file. The second is counted as the bytes
pass (during the write, in a thread); the first follows from it, because a CRC is linear: crc(A + B) is crc(A) shifted
over the length of B, xor crc(B). The format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checksums import shift_crc

_LARGE = 1 << 20  # bytes from which a thread pays
_VERSION = 45  # of the format: the first with 64-bit sizes
_SIZES_FOLLOW = 0x0008  # flag: sizes and CRC follow the data
_UTF8 = 0x0800
_DATE = (1 << 5) | 1  # 1980-01-01, so that equal content makes equal files
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF  # "see the 64-bit field"


class CheckedFile(io.RawIOBase):
    """A file that can only be appended to, and counts bytes and CRC-32 as they pass."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 (closed by close)
        self.bytes = 0
        self.crc32 = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < _LARGE:
            self._file.write(view)
            self.crc32 = zlib.crc32(view, self.crc32)
        else:
            with ThreadPoolExecutor(1) as thread:
                counted = thread.submit(zlib.crc32, view, self.crc32)
                self._file.write(view)
                self.crc32 = counted.result()
        self.bytes += len(view)
        return len(view)

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        self._file.close()
        super().close()

    def abandon(self) -> None:
        """Close without complaint: on a full disk what is still buffered fails again, after the error that counts."""
        with suppress(OSError):
            self._file.close()
        super().close()


@dataclass(frozen=True)
class _Record:
    name: bytes
    crc32: int
    size: int
    offset: int


class StoredZip:
    """Writes uncompressed records into an empty file. `finish` completes the archive."""

    def __init__(self, file: CheckedFile) -> None:
        self._file = file
        self._records: list[_Record] = []

    def record(self, name: str, pieces: Iterable[bytes | memoryview], align: int = 1) -> None:
        """Write a record whose data starts at a multiple of `align` bytes (a field of padding comes before it)."""
        encoded, offset = name.encode(), self._file.bytes
        extra = struct.pack("<HHQQ", 1, 16, 0, 0)  # the 64-bit sizes, which follow
        if align > 1:
            padding = -(offset + 30 + len(encoded) + len(extra) + 4) % align
            extra += b"FB" + struct.pack("<H", padding) + b"\0" * padding
        fields = (_VERSION, _SIZES_FOLLOW | _UTF8, 0, 0, _DATE, 0, _FULL32, _FULL32, len(encoded), len(extra))
        self._file.write(struct.pack("<4sHHHHHIIIHH", b"PK\3\4", *fields) + encoded + extra)
        start, before = self._file.bytes, self._file.crc32
        for piece in pieces:
            self._file.write(piece)
        size = self._file.bytes - start
        crc = self._file.crc32 ^ shift_crc(before, size)
        self._file.write(struct.pack("<4sIQQ", b"PK\7\x08", crc, size, size))
        self._records.append(_Record(encoded, crc, size, offset))

    def finish(self) -> None:
        """Write the directory of the records, which is at the end."""
        start = self._file.bytes
        self._file.write(b"".join(map(_entry, self._records)))
        end = self._file.bytes
        count, size = len(self._records), end - start
        wide = struct.pack(
            "<4sQHHIIQQQQ", b"PK\6\6", 44, _VERSION, _VERSION, 0, 0, count, count, size, start
        ) + struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        short = min(count, _FULL16)
        fields = (0, 0, short, short, min(size, _FULL32), min(start, _FULL32), 0)
        self._file.write(wide + struct.pack("<4sHHHHIIH", b"PK\5\6", *fields))


def _entry(record: _Record) -> bytes:
    """A record's entry in the directory, with 64-bit fields always."""
    extra = struct.pack("<HHQQQ", 1, 24, record.size, record.size, record.offset)
    fields = (
        _VERSION, _VERSION, _SIZES_FOLLOW | _UTF8, 0, 0, _DATE, record.crc32, _FULL32, _FULL32, len(record.name),
        len(extra), 0, 0, 0, 0, _FULL32,
    )  # fmt: skip
    return struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", *fields) + record.name + extra
