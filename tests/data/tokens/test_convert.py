"""Old and foreign token files become .bin/.idx pairs with the same documents."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens import convert as converting
from megatron.data.tokens.convert import convert
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.merge import merge_groups
from megatron.data.tokens.merge_inputs import find_groups
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
    monkeypatch.setattr(converting, "_PIECE", piece)
    prefix = old(tmp_path / "x", GOLDEN, [0, 1, 2, 3, 4, 5], code, kind)
    data = IndexedDataset(prefix)
    assert [data.get(i).tolist() for i in range(5)] == GOLDEN
    convert(data, tmp_path / "new")
    expected = write(tmp_path / "expected", GOLDEN, np.dtype(kind))
    for suffix in (".bin", ".idx"):
        assert Path(f"{tmp_path}/new{suffix}").read_bytes() == Path(expected + suffix).read_bytes()
    assert [report.faults for report in verify_path(tmp_path / "new", full=True)] == [[]]


def test_documents_of_several_items_stay(tmp_path: Path) -> None:
    convert(IndexedDataset(old(tmp_path / "x", GOLDEN, [0, 2, 5])), tmp_path / "new")
    new = IndexedDataset(tmp_path / "new")
    assert new.doc_idx.tolist() == [0, 2, 5] and new.sizes.tolist() == [5, 9, 3, 12, 7]


def test_npy_files(tmp_path: Path) -> None:
    for part, ids in enumerate(([70_000, 1, 0], [5, 0, 9])):
        np.asarray(ids, "<u4").tofile(tmp_path / f"p{part}.npy")
    data = TokenFiles(0, "uint32").open(str(tmp_path / "p*.npy"))
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
            IndexedDataset(prefix)
    index.write_bytes(whole)
    Path(f"{prefix}.bin").write_bytes(b"1")
    with pytest.raises(UserError, match=r"x\.bin"):
        IndexedDataset(prefix)


def test_the_old_format_is_read_wherever_a_dataset_is(tmp_path: Path) -> None:
    first = old(tmp_path / "a", GOLDEN, [0, 1, 2, 3, 4, 5])
    second = write(tmp_path / "b", GOLDEN[:2], np.dtype("<u2"))
    assert [report.faults for report in verify_path(first, full=True)] == [[]]
    joined = TokenFiles().open(str(tmp_path / "[ab]"))
    assert [joined.get(i).tolist() for i in range(len(joined))] == [*GOLDEN, *GOLDEN[:2]]
    merge_groups(find_groups([first, second], str(tmp_path / "merged")))
    expected = write(tmp_path / "expected", [*GOLDEN, *GOLDEN[:2]], np.dtype("<u2"))
    for suffix in (".bin", ".idx"):
        assert Path(f"{tmp_path}/merged{suffix}").read_bytes() == Path(expected + suffix).read_bytes()
    labels = TokenFiles().open_labels(first, TokenFiles().open(first))
    assert labels.get(3, 2, 4).tolist() == GOLDEN[3][2:6]
    again = pickle.loads(pickle.dumps(labels))  # as loader workers get it
    assert again.tokens.tolist() == [token for item in GOLDEN for token in item]


def test_a_pure_merge_of_gpt_neox_has_no_documents_of_its_own(tmp_path: Path) -> None:
    data = IndexedDataset(old(tmp_path / "x", GOLDEN, [0]))
    assert data.num_documents == len(data) == 5


@pytest.mark.parametrize(
    ("number", "value", "message"),
    [
        (0, 2, "version 2"),
        (1, 77, "code 77"),
        (2, 4, "4 bytes per token.* 2"),
        (3, -1, "-1 items"),
        (4, 6, "5 items.* 248 bytes.* 240"),
        (6 + 6 + 1, 1, "item 1 begins at byte 2.* 10"),
        (6 + 12, 2**40, "item 0 has 1099511627776 tokens"),
        (6 + 12 + 5, 1, "item 0"),
    ],
)
def test_an_old_index_that_lies(tmp_path: Path, number: int, value: int, message: str) -> None:
    index = Path(old(tmp_path / "x", GOLDEN, [0, 1, 2, 3, 4, 5]) + ".idx")
    words = np.fromfile(index, "<i8")
    words[1 + number] = value
    words.tofile(index)
    with pytest.raises(UserError, match=rf"x\.idx: .*{message}"):
        IndexedDataset(tmp_path / "x")


def test_the_tool(tmp_path: Path) -> None:
    prefix = old(tmp_path / "x", GOLDEN, [0, 1, 2, 3, 4, 5])
    command = [sys.executable, str(ROOT / "tools/datasets/convert_dataset.py"), "--input", prefix]
    done = subprocess.run(
        [*command, "--output-prefix", str(tmp_path / "new")], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/new: 5 documents, 36 tokens, uint16\n"), done.stderr
