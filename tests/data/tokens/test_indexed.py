"""The `.bin`/`.idx` format against bytes laid out by hand."""

from __future__ import annotations

import mmap
import pickle
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import IndexedDataset, token_dtype
from megatron.data.tokens.mapped_file import MappedFile
from megatron.data.tokens.prefixes import find_prefix
from megatron.errors import UserError
from tests.data.corpus import GOLDEN, write

pytestmark = pytest.mark.cpu


def index_bytes(code: int, sizes: list[int], pointers: list[int], doc_idx: list[int]) -> bytes:
    """An index written out field by field from the format's description."""
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(sizes), len(doc_idx))
        + struct.pack(f"<{len(sizes)}i", *sizes)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(doc_idx)}q", *doc_idx)
    )


def test_golden_bytes(tmp_path: Path) -> None:
    prefix = write(tmp_path / "five", GOLDEN)
    found = Path(f"{prefix}.idx").read_bytes()
    assert len(found) == 142
    assert found == index_bytes(8, [5, 9, 3, 12, 7], [0, 10, 28, 34, 58], [0, 1, 2, 3, 4, 5])
    flat = [token for document in GOLDEN for token in document]
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<36H", *flat)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["five.bin", "five.idx"]


def test_reads_a_foreign_file(tmp_path: Path) -> None:
    (tmp_path / "a.idx").write_bytes(index_bytes(4, [2, 0, 3], [0, 8, 8], [0, 1, 3]))
    (tmp_path / "a.bin").write_bytes(struct.pack("<5i", 70000, 1, -100, 3, 4))
    data = IndexedDataset(tmp_path / "a")
    assert (len(data), data.num_tokens, data.num_documents, data.dtype) == (3, 5, 2, np.int32)
    assert [data[i].tolist() for i in range(3)] == [[70000, 1], [], [-100, 3, 4]]
    assert data.get(2, 1).tolist() == [3, 4]
    assert data.get(2, 1, 1).tolist() == [3]
    assert pickle.loads(pickle.dumps(data))[0].tolist() == [70000, 1]
    for arguments in [(3,), (-1,), (0, 0, 3), (0, -1, 1), (2, 1, -1)]:
        with pytest.raises(IndexError):
            data.get(*arguments)


@pytest.mark.parametrize(("code", "written"), [(6, "<f4"), (6, "<f8"), (7, "<f8"), (7, "<f4")])
def test_both_tables_of_float_codes(tmp_path: Path, code: int, written: str) -> None:
    values = np.asarray([0.5, 1.5, 2.5], written)
    (tmp_path / "r.idx").write_bytes(index_bytes(code, [1, 2], [0, values.itemsize], [0, 1, 2]))
    (tmp_path / "r.bin").write_bytes(values.tobytes())
    assert IndexedDataset(tmp_path / "r")[1].tolist() == [1.5, 2.5]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 65535), max_size=5), min_size=1, max_size=8), st.data())
def test_round_trip(documents: list[list[int]], draw: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        split = draw.draw(st.integers(0, len(documents)))
        with IndexedDatasetBuilder(f"{folder}/x", np.uint16) as builder:
            for document in documents[:split]:
                builder.add_document(document)
            rest = documents[split:]
            flat = np.asarray([token for document in rest for token in document], dtype=np.int64)
            builder.add_documents(flat, [len(document) for document in rest])
            builder.finalize()
        data = IndexedDataset(f"{folder}/x")
        assert [data[i].tolist() for i in range(len(data))] == documents
        assert data.doc_idx.tolist() == list(range(len(documents) + 1))


def test_documents_of_several_items_and_append(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        builder.add_item([1, 2])
        builder.add_item([3])
        builder.end_document()
        builder.add_document([4])
        builder.finalize()
    write(tmp_path / "b", [[5], [6, 7]])
    with IndexedDatasetBuilder(tmp_path / "both", np.uint16) as builder:
        builder.append(tmp_path / "a")
        builder.append(tmp_path / "b")
        builder.finalize()
    both = IndexedDataset(tmp_path / "both")
    assert both.doc_idx.tolist() == [0, 2, 3, 4, 5]
    assert both.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert both.pointers.tolist() == [0, 4, 6, 8, 10]
    with IndexedDatasetBuilder(tmp_path / "c", np.int32) as builder, pytest.raises(UserError, match="uint16.*int32"):
        builder.append(tmp_path / "a")
    assert not list(tmp_path.glob("*.partial"))


def test_a_failed_writer_leaves_nothing_and_keeps_the_old_dataset(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[1, 2]])
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document([3])
        raise RuntimeError("stop")
    assert IndexedDataset(prefix)[0].tolist() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
    assert IndexedDataset(write(prefix, [[9]]))[0].tolist() == [9]


def test_token_type_follows_the_vocabulary_with_added_tokens() -> None:
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32
    assert token_dtype(65490 + 60) == np.int32


@pytest.mark.parametrize(("dtype", "token"), [(np.uint16, 65536), (np.uint16, -100), (np.int32, 2**31)])
def test_an_id_beyond_the_type_raises(tmp_path: Path, dtype: type, token: int) -> None:
    with IndexedDatasetBuilder(tmp_path / "x", dtype) as builder:
        with pytest.raises(ValueError, match=str(token)):
            builder.add_item([1, token])
        with pytest.raises(ValueError, match="integers"):
            builder.add_item([1.5])
    assert not list(tmp_path.iterdir())


def test_large_id_round_trips(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[65540, 3]], token_dtype(65550))
    assert IndexedDataset(prefix)[0].tolist() == [65540, 3]


def test_byte_offsets_beyond_2_gib(tmp_path: Path) -> None:
    """Only the index is written: the sizes are claimed, the tokens a sparse file."""
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder._add_sizes(np.array([2**30, 2**30, 5]))
        builder._end_documents(np.array([1, 2, 3]))
        builder._bin.truncate(2 * (2**31 + 5))
        builder._bin.seek(2 * 2**31)
        builder._bin.write(struct.pack("<5H", 1, 2, 3, 4, 5))
        builder.finalize()
    data = IndexedDataset(tmp_path / "x")
    assert data.pointers.tolist() == [0, 2147483648, 4294967296]
    assert data[2].tolist() == [1, 2, 3, 4, 5]
    assert data.get(2, 3).tolist() == [4, 5]


def test_sparse_5_gb_file_reads_its_last_document(tmp_path: Path) -> None:
    """A foreign index over int32 tokens; `.bin` occupies no blocks but the last."""
    sizes = [10**9, 250_000_000, 3]
    (tmp_path / "x.idx").write_bytes(index_bytes(4, sizes, [0, 4 * 10**9, 5 * 10**9], [0, 1, 2, 3]))
    with (tmp_path / "x.bin").open("wb") as file:
        file.truncate(5 * 10**9)
        file.seek(5 * 10**9)
        file.write(struct.pack("<3i", 7, 8, 9))
    data = IndexedDataset(tmp_path / "x")
    assert data[2].tolist() == [7, 8, 9]
    assert data.get(0, 10**9 - 1).tolist() == [0]
    used = int(subprocess.run(["du", "-k", tmp_path / "x.bin"], capture_output=True, text=True).stdout.split()[0])
    assert used < 1024


def test_warm_up_reads_one_byte_of_every_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = IndexedDataset(write(tmp_path / "x", [[1] * 10_000]))
    data.warm_up()

    class Pages:
        seen: list[int] = []

        def __len__(self) -> int:
            return 20_000

        def __getitem__(self, part: slice) -> np.ndarray:
            Pages.seen.extend(range(part.start, min(part.stop, 20_000), part.step))
            return np.zeros(1)

    monkeypatch.setattr(MappedFile, "whole", lambda _: Pages())
    data.warm_up()
    assert Pages.seen == list(range(0, 20_000, mmap.PAGESIZE))


def test_damage_is_refused_with_file_and_sizes(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", GOLDEN)
    idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    whole, tokens = idx.read_bytes(), bin_.read_bytes()

    def refused(pattern: str) -> None:
        with pytest.raises(UserError, match=pattern):
            IndexedDataset(prefix)

    idx.write_bytes(whole[:-8])
    refused(r"x\.idx.*142 bytes.*134")
    idx.write_bytes(whole[:20])
    refused(r"x\.idx.*34 bytes.*20")
    idx.write_bytes(b"hello" * 20)
    refused(r"x\.idx: not a token index.*hello")
    idx.write_bytes(b"TNTIDX\x00\x00" + whole[8:])
    refused(r"x\.idx.*version 256")  # the older format, whose numbers begin one byte before
    idx.write_bytes(whole[:9] + struct.pack("<Q", 2) + whole[17:])
    refused("version 2")
    idx.write_bytes(whole[:17] + bytes([9]) + whole[18:])
    refused("type code 9")
    idx.write_bytes(whole)
    bin_.write_bytes(tokens[:-1])
    refused(r"x\.bin.*72 bytes.*71")
    bin_.unlink()
    refused(r"x\.bin is missing")


@pytest.mark.parametrize("given", ["c", "c_text_document", "c_text_document.bin", "c_text_document.idx", "c.bin"])
def test_prefix_with_and_without_suffix(tmp_path: Path, given: str) -> None:
    written = write(tmp_path / "c_text_document", [[1]])
    assert find_prefix(tmp_path / given) == written


def test_prefix_with_a_suffix_too_many(tmp_path: Path) -> None:
    assert find_prefix(f"{write(tmp_path / 'c', [[1]])}_text_document") == str(tmp_path / "c")


def test_an_unfinished_dataset_is_called_that(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "c_text_document", np.uint16) as builder:
        builder.add_document([1])
        for given in ("c", "c_text_document"):
            with pytest.raises(UserError, match=r"c_text_document is not finished \(.*\.bin\.partial\)"):
                find_prefix(tmp_path / given)


def test_missing_prefix_lists_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "sub" / "wiki_text_document", [[1]])
    with pytest.raises(UserError, match="wiki_text_document"):
        find_prefix(tmp_path / "sub" / "wikipedia")
    with pytest.raises(UserError, match=r"below .*sub/wiki_text_document"):
        find_prefix(tmp_path / "wiki")
    with pytest.raises(UserError, match=r"Did you mean a list\? Write \['a', 'b'\]"):
        find_prefix("a,b")
    with pytest.raises(UserError, match="folder .* does not exist"):
        find_prefix(tmp_path / "nowhere" / "x")
