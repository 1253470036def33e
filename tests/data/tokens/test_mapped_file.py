"""Pieces of files: the bytes that are there, whatever the place and the length."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens import mapped_file
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.mapped_file import MappedFile
from megatron.errors import UserError
from tests.data.corpus import write

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("at_once", [0, 1 << 30])
@pytest.mark.parametrize("offset", [0, 5, 4096])
def test_every_place_and_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, offset: int) -> None:
    monkeypatch.setattr(mapped_file, "_AT_ONCE", at_once)
    content = np.random.default_rng(0).integers(0, 256, 3 * mmap.PAGESIZE + 17, dtype=np.uint8)
    content.tofile(tmp_path / "x")
    expected = content[offset:]
    found = MappedFile(tmp_path / "x", offset)
    assert np.array_equal(found.whole(), expected)
    for start in (0, 1, 4095, 4096, 4097, len(expected) - 1, len(expected)):
        for size in (0, 1, 100, 4096, len(expected)):
            size = min(size, len(expected) - start)
            assert np.array_equal(found.read(start, size), expected[start : start + size])


def test_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    found = MappedFile(tmp_path / "x")
    assert found.size == 0 and len(found.whole()) == 0 and len(found.read(0, 0)) == 0


def test_samples_are_read_without_reading_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document is asked for by exactly its pages; the mapping is marked so that nothing around it comes along."""
    advice: list[tuple[int, ...]] = []

    class Watched(mmap.mmap):
        def madvise(self, *what: int) -> None:
            advice.append(what)
            super().madvise(*what)

    monkeypatch.setattr(mapped_file.mmap, "mmap", Watched)
    data = IndexedDataset(write(tmp_path / "x", [[1] * 3000, [2] * 40_000, [3] * 100]))
    assert advice == [(mmap.MADV_RANDOM,)]
    assert data.get(0).sum() == 3000 and data.get(2).sum() == 300
    assert len(advice) == 1
    assert data.get(1).sum() == 80_000
    assert advice[1:] == [(mmap.MADV_WILLNEED, 4096, 6000 + 80_000 - 4096)]


def test_too_many_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    (tmp_path / "x").write_bytes(b"x")
    monkeypatch.setattr(mapped_file.mmap, "mmap", full)
    with pytest.raises(UserError, match="ulimit -n"):
        MappedFile(tmp_path / "x")
