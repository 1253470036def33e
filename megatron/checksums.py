"""CRC-32 of files: read in pieces that several threads check at once, joined afterwards, and of a small sample.

A CRC is linear, so that of a whole follows from those of its parts: crc(A + B) is crc(A) shifted over the length of B,
xor crc(B). It finds damage, not malice.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

_PIECE = 1 << 24  # bytes that a thread checks in one go, in blocks
_BLOCK = 1 << 20
_THREADS = min(4, os.cpu_count() or 1)
_SAMPLES, _SAMPLE = 16, 1 << 12  # places of a file, and bytes at each
_POLYNOMIAL = 0xEDB88320


def file_crc32(path: str | Path, report: Callable[[int], None] = lambda nbytes: None) -> int:
    """CRC-32 of a file's content. `report` is called with the bytes of every piece. Raises `OSError`."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        pieces = [(at, min(_PIECE, size - at)) for at in range(0, size, _PIECE)]
        crc = 0
        if len(pieces) < 2:
            return _crc_of(file.fileno(), (0, size))
        with ThreadPoolExecutor(min(_THREADS, len(pieces))) as threads:
            found = threads.map(partial(_crc_of, file.fileno()), pieces)
            for (_, length), part in zip(pieces, found, strict=True):
                crc = join_crcs(crc, part, length)
                report(length)
    return crc


def sample_crc32(path: str | Path) -> int:
    """CRC-32 of 16 blocks of 4 KiB spread evenly over a file, the first and the last among them; of all of a small one.

    It tells a file that was replaced or written again, not one changed bit. Raises `OSError`.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _SAMPLES * _SAMPLE:
            return _crc_of(file.fileno(), (0, size))
        crc = 0
        for k in range(_SAMPLES):
            crc = zlib.crc32(os.pread(file.fileno(), _SAMPLE, (size - _SAMPLE) * k // (_SAMPLES - 1)), crc)
    return crc


def _crc_of(file: int, piece: tuple[int, int]) -> int:
    (at, left), crc = piece, 0
    while left:
        block = os.pread(file, min(left, _BLOCK), at)
        if not block:  # it became shorter since it was opened
            break
        crc, at, left = zlib.crc32(block, crc), at + len(block), left - len(block)
    return crc


def join_crcs(first: int, second: int, length: int) -> int:
    """CRC-32 of A + B from that of A and that of B, which has `length` bytes."""
    return shift_crc(first, length) ^ second


def shift_crc(crc: int, length: int) -> int:
    """What CRC-32 `crc` of some bytes becomes when `length` zero bytes follow, apart from theirs: crc · x^(8·length).

    So crc32(A + B) == shift_crc(crc32(A), len(B)) ^ crc32(B).
    """
    power = 1 << 23  # x^8; polynomials modulo the CRC's have their x^0 in the highest bit
    while length:
        if length & 1:
            crc = _product(crc, power)
        power = _product(power, power)
        length >>= 1
    return crc


def _product(a: int, b: int) -> int:
    """The product of two polynomials over two elements, modulo the CRC's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
