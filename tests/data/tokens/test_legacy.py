"""Old and foreign token files become .bin/.idx pairs with the same documents."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens import legacy
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.legacy import LegacyTokens, convert, open_any
from megatron.data.tokens.token_files import TokenFiles
from megatron.data.tokens.verify import verify_path
from megatron.errors import UserError
from tests.data.corpus import GOLDEN, write

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[3]


def old(prefix: Path, items: list[list[int]], documents: list[int], code: int = 8, kind: str = "<u2") -> str:
    """The old format, byte by byte: magic, six u64, then four int64 lists."""
    sizes = [len(item) for item in items]
    offsets = np.cumsum([0, *sizes]).tolist()
    numbers = [1, code, np.dtype(kind).itemsize, len(items), len(items), len(documents)]
    lists = [*range(len(items) + 1), *offsets, *sizes, *documents]
    prefix.with_suffix(".idx").write_bytes(
        b"TNTIDX\0\0" + struct.pack(f"<{len(numbers) + len(lists)}q", *numbers, *lists)
    )
    np.concatenate([np.asarray(item, kind) for item in items]).tofile(prefix.with_suffix(".bin"))
    return str(prefix)


@pytest.mark.parametrize("piece", [1, 10, 1 << 22])
@pytest.mark.parametrize(("code", "kind"), [(8, "<u2"), (4, "<i4")])
def test_old_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, code: int, kind: str) -> None:
    monkeypatch.setattr(legacy, "_PIECE", piece)
    prefix = old(tmp_path / "x", GOLDEN, [0, 1, 2, 3, 4, 5], code, kind)
    data = LegacyTokens(prefix)
    assert [data.get(i).tolist() for i in range(5)] == GOLDEN
    convert(data, tmp_path / "new")
    expected = write(tmp_path / "expected", GOLDEN, np.dtype(kind))
    for suffix in (".bin", ".idx"):
        assert Path(f"{tmp_path}/new{suffix}").read_bytes() == Path(expected + suffix).read_bytes()
    assert [report.faults for report in verify_path(tmp_path / "new", full=True)] == [[]]


def test_documents_of_several_items_stay(tmp_path: Path) -> None:
    convert(LegacyTokens(old(tmp_path / "x", GOLDEN, [0, 2, 5])), tmp_path / "new")
    new = IndexedDataset(tmp_path / "new")
    assert new.doc_idx.tolist() == [0, 2, 5] and new.sizes.tolist() == [5, 9, 3, 12, 7]


def test_npy_files(tmp_path: Path) -> None:
    for part, ids in enumerate(([70_000, 1, 0], [5, 0, 9])):
        np.asarray(ids, "<u4").tofile(tmp_path / f"p{part}.npy")
    data = open_any(str(tmp_path / "p*.npy"), TokenFiles(0, "uint32"))
    manifest = convert(data, tmp_path / "new")
    new = IndexedDataset(tmp_path / "new")
    assert [new.get(i).tolist() for i in range(3)] == [[70_000, 1, 0], [5, 0], [9]]
    assert (manifest.dtype, manifest.documents) == ("int32", 3)
    with pytest.raises(UserError, match="cannot be stored as uint16"):
        convert(data, tmp_path / "small", np.dtype(np.uint16))
    assert not list(tmp_path.glob("small*"))


def test_damage_is_named(tmp_path: Path) -> None:
    prefix = old(tmp_path / "x", GOLDEN, [0, 1, 2, 3, 4, 5])
    index = Path(f"{prefix}.idx")
    whole = index.read_bytes()
    for damaged in (whole[:-8], whole[:20], whole[:8] + b"\2" + whole[9:]):
        index.write_bytes(damaged)
        with pytest.raises(UserError, match=r"x\.idx"):
            LegacyTokens(prefix)
    index.write_bytes(whole)
    Path(f"{prefix}.bin").write_bytes(b"1")
    with pytest.raises(UserError, match=r"x\.bin"):
        LegacyTokens(prefix)


def test_the_tool_that_the_error_names(tmp_path: Path) -> None:
    prefix = old(tmp_path / "x", GOLDEN, [0, 1, 2, 3, 4, 5])
    with pytest.raises(UserError, match=r"tools/datasets/convert_dataset\.py"):
        IndexedDataset(prefix)
    command = [sys.executable, str(ROOT / "tools/datasets/convert_dataset.py"), "--input", prefix]
    done = subprocess.run(
        [*command, "--output-prefix", str(tmp_path / "new")], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/new: 5 documents, 36 tokens, uint16\n"), done.stderr
