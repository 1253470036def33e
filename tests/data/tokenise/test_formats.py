"""Readers of text corpora."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.data.tokenise import chunks as chunks_module
from megatron.data.tokenise import formats
from megatron.data.tokenise.chunks import Document, Fault, Record
from megatron.data.tokenise.formats import read_chunks
from megatron.data.tokenise.inputs import find_inputs
from megatron.errors import UserError

pytestmark = pytest.mark.cpu

ROWS = [{"text": f"document {i} " + "x" * (i * 7 % 50), "n": i} for i in range(1000)]
TEXTS = [row["text"] for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write_zst(path: Path, data: bytes) -> None:
    import zstandard

    half = len(data) // 2  # two frames, as appending makes them
    path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:])))


def write_parquet(path: Path, data: bytes) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=300)


def write_arrow_file(path: Path, data: bytes) -> None:
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, pa.schema({"text": "str", "n": "int64"})) as writer:
        writer.write_table(pa.Table.from_pylist(ROWS, schema=writer_schema()), max_chunksize=400)


def write_arrow_stream(path: Path, data: bytes) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(path.parent / "saved"))
    (path.parent / "saved" / "data-00000-of-00001.arrow").rename(path)


def writer_schema() -> object:
    import pyarrow as pa

    return pa.schema({"text": "str", "n": "int64"})


WRITERS: dict[str, Callable[[Path, bytes], None]] = {
    "a.jsonl": lambda path, data: path.write_bytes(data) and None,
    "a.ndjson": lambda path, data: path.write_bytes(data.rstrip(b"\n")) and None,
    "b.json": lambda path, data: path.write_bytes(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")) and None,
    "list.json": lambda path, data: path.write_text(json.dumps(ROWS, indent=1)) and None,
    "a.jsonl.gz": lambda path, data: path.write_bytes(gzip.compress(data)) and None,
    "a.jsonl.xz": lambda path, data: path.write_bytes(lzma.compress(data)) and None,
    "a.jsonl.bz2": lambda path, data: path.write_bytes(bz2.compress(data)) and None,
    "a.jsonl.zst": write_zst,
    "a.parquet": write_parquet,
    "file.arrow": write_arrow_file,
    "stream.arrow": write_arrow_stream,
}


def documents(path: Path, keys: tuple[str, ...] = ("text",)) -> list[Document | Fault]:
    """All documents, each chunk sent through pickle as to a worker."""
    chunks = [pickle.loads(pickle.dumps(chunk)) for chunk in read_chunks(find_inputs([str(path)]))]
    return [document for chunk in chunks for document in chunk.documents(keys)]


def faults(path: Path) -> list[tuple[str, str]]:
    return [(d.where.replace(f"{path}", path.name), d.reason) for d in documents(path) if isinstance(d, Fault)]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("block", [1 << 18, 700])
def test_every_format_gives_the_same_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block: int
) -> None:
    monkeypatch.setattr(formats, "CHUNK_BYTES", block)
    WRITERS[name](tmp_path / name, LINES)
    found = documents(tmp_path / name)
    assert [document.texts["text"] for document in found] == TEXTS


@pytest.mark.parametrize("name", WRITERS)
def test_the_case_of_an_extension_means_nothing(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, LINES)
    (tmp_path / name).rename(tmp_path / name.upper())
    assert [document.texts["text"] for document in documents(tmp_path / name.upper())] == TEXTS
    assert find_inputs([str(tmp_path)]) == [tmp_path / name.upper()]


@pytest.mark.parametrize("kind", ["binary", "large_binary", "dictionary"])
def test_a_binary_column_is_called_that(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.array([b"one", b"two"], pa.large_binary() if kind == "large_binary" else pa.binary())
    pq.write_table(
        pa.table({"text": values.dictionary_encode() if kind == "dictionary" else values}), tmp_path / "a.parquet"
    )
    assert [where for where, _ in faults(tmp_path / "a.parquet")] == ["a.parquet, row 0", "a.parquet, row 1"]
    assert all(re.search("'text'.* bytes .*binary.*string", reason) for _, reason in faults(tmp_path / "a.parquet"))


@pytest.mark.parametrize("name", WRITERS)
def test_progress_adds_up_to_the_size_on_disk(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, LINES)
    size = (tmp_path / name).stat().st_size
    assert sum(chunk.nbytes for chunk in read_chunks([tmp_path / name])) == pytest.approx(size, rel=0.1)


def test_places_are_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "CHUNK_BYTES", 64)
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    assert [document.where for document in documents(path)] == [f"{path}:{i}" for i in range(1, 1001)]


@pytest.mark.parametrize("name", WRITERS)
def test_records_are_what_was_written(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, LINES)
    records = [record for chunk in read_chunks([tmp_path / name]) for record in chunk.records()]
    assert all(isinstance(record, Record) for record in records)
    assert [dict(record.value) for record in records if isinstance(record, Record)] == ROWS
    assert records[7].where.endswith((f"{name}:8", f"{name}, row 7"))
    for chunk in read_chunks([tmp_path / name]):
        assert all(record.value["n"] >= 0 for record in chunk.records(["n"]) if isinstance(record, Record))


def test_records_of_lines_leave_blank_ones_out_and_name_faults(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"m": [1]}\n \n[3]\n{"m": {"x": null}}')
    first, fault, last = [record for chunk in read_chunks([path]) for record in chunk.records()]
    assert (first, last) == (Record(f"{path}:1", {"m": [1]}), Record(f"{path}:4", {"m": {"x": None}}))
    assert isinstance(fault, Fault) and fault.where == f"{path}:3"
    assert re.search("object.* list", fault.reason)


def test_a_large_row_group_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "GROUP_BYTES", 1000)
    write_parquet(tmp_path / "a.parquet", b"")
    chunks = list(read_chunks([tmp_path / "a.parquet"]))
    assert len(chunks) > 20
    found = [document for chunk in chunks for document in chunk.documents(["text"])]
    assert [d.texts["text"] for d in found if isinstance(d, Document)] == TEXTS
    assert [d.where for d in found] == [f"{tmp_path / 'a.parquet'}, row {i}" for i in range(1000)]
    assert sum(chunk.nbytes for chunk in chunks) == (tmp_path / "a.parquet").stat().st_size


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, b"")
    raw = bytearray(path.read_bytes())
    raw[4:2000] = bytes(1996)  # the index at the end is whole
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"a\.parquet: row group 0\b"):
        [list(chunk.documents(["text"])) for chunk in read_chunks([path])]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes("\ufeffone\r\ntwo\n".encode())
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("three\n")
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe")
    found = documents(tmp_path)
    assert [d.texts["text"] for d in found[:2]] == ["one\ntwo\n", "three\n"]
    assert isinstance(found[2], Fault)
    assert "not UTF-8" in found[2].reason


def test_a_line_longer_than_a_block_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "CHUNK_BYTES", 1000)
    long = "y" * 100_000
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", long, "b", long)))
    assert [d.texts["text"] for d in documents(path)] == ["a", long, "b", long]


def test_faults_name_line_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"txt": "x"}\n{"text": 3}\n{"text": null}\n["text"]\n{"text": \n\xff\n')
    found = faults(path)
    assert [where for where, _ in found] == [f"a.jsonl:{line}" for line in range(2, 8)]
    facts = ("'text'.*'txt'", "'text'.* number.*string", "'text'.* null.*string", "object.* list", "JSON: ", "UTF-8: ")
    for (_, reason), fact in zip(found, facts, strict=True):
        assert re.search(fact, reason)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_are_not_guessed(tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "a"}\n{"text": "b"}\n'.encode(encoding))
    assert [where for where, _ in faults(path)][:2] == ["a.jsonl:1", "a.jsonl:2"]
    found = [chunk.columns(["text"]) for chunk in read_chunks([path])]
    monkeypatch.setattr(
        chunks_module, "_parse_fast", chunks_module._parse_json
    )  # where the faster one is not installed
    assert [chunk.columns(["text"]) for chunk in read_chunks([path])] == found
    assert all(columns == [[]] for columns, _ in found)


def test_blank_lines_are_empty_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n  \n{"text": "a"}\n\n')
    assert [d.texts["text"] for d in documents(path)] == ["", "", "a", ""]


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud83d b"}\n{"text": "\\ud83d\\ude00"}\n')
    assert [d.texts["text"] for d in documents(path)] == ["a\ufffd b", "😀"]


def test_several_keys_each_have_their_own_text(tmp_path: Path) -> None:
    rows = [{"q": "one?", "a": "two."}, {"q": "three?", "a": "four."}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [dict(d.texts) for d in documents(path, ("a", "q"))] == rows


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", b"")
    with pytest.raises(UserError, match=r"a\.parquet: .*'txt'.*'text'.*: text, n"):
        documents(tmp_path / "a.parquet", ("txt",))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.jsonl.bz2", "a.jsonl.zst", "a.parquet", "file.arrow"])
@pytest.mark.parametrize("damage", ["short", "foreign", "empty"])
def test_damaged_files_are_errors_not_less_data(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / name
    WRITERS[name](path, LINES)
    whole = path.read_bytes()
    path.write_bytes({"short": whole[: len(whole) * 2 // 3], "foreign": b"not at all" * 30, "empty": b""}[damage])
    with pytest.raises(UserError, match=name):
        documents(path)
