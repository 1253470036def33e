"""Pieces of a corpus that can be sent to a worker, and the documents inside them."""

from __future__ import annotations

import functools
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.tokenise.compression import open_input
from megatron.errors import UserError, nearest

BATCH_ROWS = 256


@dataclass(frozen=True)
class Position:
    """A place between two chunks from which reading can resume.

    `file`: how many files (or parts of files) precede it; `offset`: where the next chunk starts in its file, in the
    reader's unit (bytes of content, rows, row groups); `number`: that of the chunk's first record.
    """

    file: int = 0
    offset: int = 0
    number: int = 0


@dataclass(frozen=True)
class Record:
    """One parsed record, and its place (`file:line`, `file` or `file, row n`)."""

    where: str
    value: Mapping[str, Any]


@dataclass(frozen=True)
class Document:
    """The texts of one record by key, and its place (`file:line`, `file` or `file, row n`)."""

    where: str
    texts: Mapping[str, str]


@dataclass(frozen=True)
class Fault:
    """An unusable record: its place and what is wrong."""

    where: str
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", exact_place(self.where))


class Chunk(ABC):
    """Consecutive records of one file. `nbytes`: their share of the file on disk (for the progress display only)."""

    nbytes: int

    @abstractmethod
    def records(self, columns: Sequence[str] | None = None) -> Iterator[Record | Fault]:
        """The records in order, without blank lines. `columns`: the needed ones, None for all (more may be given).

        Raises `UserError` for a column that the file does not have, if its format says so.
        """

    def documents(self, keys: Sequence[str]) -> Iterator[Document | Fault]:
        """The records in order, each with the text of every key; a blank line counts as an empty document."""
        for record in self.records(keys):
            yield record if isinstance(record, Fault) else _document(record.where, record.value, keys)

    def columns(self, keys: Sequence[str]) -> tuple[list[list[str]], list[Fault]]:
        """`documents` all at once: the texts of each key, in order, and the unusable records."""
        faults: list[Fault] = []
        columns: list[list[str]] = [[] for _ in keys]
        for document in self.documents(keys):
            _file(document, keys, columns, faults)
        return columns, faults


@dataclass(frozen=True)
class LineChunk(Chunk):
    """Whole lines of JSON; `first` is the number of the first, counted from 1 at byte `origin` of the file."""

    path: str
    first: int
    raw: bytes
    nbytes: int
    origin: int = 0

    def records(self, columns: Sequence[str] | None = None) -> Iterator[Record | Fault]:
        """One record per line that is not blank."""
        return (parsed for where, line in self._lines() if (parsed := _parse(where, line)) is not None)

    def documents(self, keys: Sequence[str]) -> Iterator[Document | Fault]:
        """One document per line; a blank line counts as an empty document."""
        return (_document_of_line(where, line, keys) for where, line in self._lines())

    def columns(self, keys: Sequence[str]) -> tuple[list[list[str]], list[Fault]]:
        """`documents` all at once; ordinary lines take a faster path."""
        faults: list[Fault] = []
        columns: list[list[str]] = [[] for _ in keys]
        for number, line in enumerate(self.raw.removesuffix(b"\n").split(b"\n"), start=self.first):
            texts = _texts_of_line(line, keys)
            if texts is None:
                where = place_of_line(self.path, number, self.origin)
                _file(_document_of_line(where, line, keys), keys, columns, faults)
            else:
                for column, text in zip(columns, texts):
                    column.append(text)
        return columns, faults

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        lines = self.raw.removesuffix(b"\n").split(b"\n")
        places = (place_of_line(self.path, number, self.origin) for number in itertools.count(self.first))
        return zip(places, lines)


@dataclass(frozen=True)
class RowChunk(Chunk):
    """Records in memory; `first` is the number of the first, counted from 0."""

    path: str
    first: int
    rows: Sequence[Mapping[str, Any]]
    nbytes: int

    def records(self, columns: Sequence[str] | None = None) -> Iterator[Record | Fault]:
        """One record per row."""
        for number, row in enumerate(self.rows, start=self.first):
            yield _record(f"{self.path}, row {number}", row)


@dataclass(frozen=True)
class RowGroupChunk(Chunk):
    """Rows of one row group of a parquet file, read where the chunk is used, and only the needed columns.

    `first` is the number of the group's first row. The chunk has `rows` rows (None: all) from row `start` of the group.
    """

    path: str
    group: int
    first: int
    nbytes: int
    start: int = 0
    rows: int | None = None

    def records(self, columns: Sequence[str] | None = None) -> Iterator[Record | Fault]:
        """One record per row."""
        import pyarrow
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path) as file:
                wanted = self._select_columns(columns, file.schema_arrow.names)
                yield from self._rows(file.iter_batches(BATCH_ROWS, row_groups=[self.group], columns=wanted))
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{self.path}: row group {self.group} cannot be read: {error}") from error

    def _rows(self, batches: Iterator[Any]) -> Iterator[Record | Fault]:
        at, stop = 0, None if self.rows is None else self.start + self.rows
        for batch in batches:
            if stop is not None and at >= stop:
                return
            low, high = max(self.start - at, 0), batch.num_rows if stop is None else stop - at
            if low < batch.num_rows:
                part = batch.slice(low, high - low)
                yield from RowChunk(self.path, self.first + at + low, part.to_pylist(), 0).records()
            at += batch.num_rows

    def _select_columns(self, columns: Sequence[str] | None, names: list[str]) -> list[str] | None:
        for key in columns or ():
            if key not in names:
                raise UserError(f"{self.path}: no column {key!r}.{nearest(key, names)} It has: {', '.join(names)}")
        return None if columns is None else list(columns)


@dataclass(frozen=True)
class FilesChunk(Chunk):
    """Whole files of plain text, one document each, read where the chunk is used."""

    paths: tuple[str, ...]
    nbytes: int

    def records(self, columns: Sequence[str] | None = None) -> Iterator[Record | Fault]:
        """One record per file, its content under the key "text"."""
        for path in self.paths:
            try:
                with open_input(Path(path)) as (file, _):
                    text = file.read().decode("utf-8-sig")
            except UnicodeDecodeError as error:
                yield Fault(path, f"not UTF-8: {error}")
                continue
            if "\0" in text:
                yield Fault(path, "has bytes that are zero: not plain text, or UTF-16")
                continue
            yield Record(path, {"text": text.replace("\r\n", "\n")})


_FROM_BYTE = re.compile(r"(?P<path>.*):(?P<number>\d+) \(counted from byte (?P<origin>\d+)\)", re.DOTALL)


def place_of_line(path: str, number: int, origin: int = 0) -> str:
    """`file:line`; with a note when lines are counted from byte `origin` instead of from the start of the file."""
    return f"{path}:{number} (counted from byte {origin})" if origin else f"{path}:{number}"


def exact_place(where: str) -> str:
    """A `place_of_line` as `file:line` counted from the start of the file; any other place unchanged."""
    match = _FROM_BYTE.fullmatch(where)
    if match is None:
        return where
    return f"{match['path']}:{int(match['number']) + _lines_before(match['path'], int(match['origin']))}"


@functools.lru_cache(maxsize=16)  # a process reads from the middle of very few files
def _lines_before(path: str, origin: int) -> int:
    lines, left = 0, origin
    with open(path, "rb") as file:
        while left and (block := file.read(min(left, 1 << 22))):
            lines, left = lines + block.count(b"\n"), left - len(block)
    return lines


def _file(document: Document | Fault, keys: Sequence[str], columns: Sequence[list[str]], faults: list[Fault]) -> None:
    if isinstance(document, Fault):
        faults.append(document)
    else:
        for column, key in zip(columns, keys):
            column.append(document.texts[key])


def _document_of_line(where: str, line: bytes, keys: Sequence[str]) -> Document | Fault:
    record = _parse(where, line)
    if record is None:
        return Document(where, dict.fromkeys(keys, ""))
    return record if isinstance(record, Fault) else _document(where, record.value, keys)


def _texts_of_line(line: bytes, keys: Sequence[str]) -> list[str] | None:
    """The texts of an ordinary record, None for any other.

    Uses a faster parser than Python's where one is installed. It accepts less (no NaN, no halves of UTF-16 pairs, ...),
    and makes the same strings of what both accept.
    """
    try:
        record = _parse_fast(line)
        texts = [record[key] for key in keys]
        for text in texts:
            if not text.isascii() and _parse_fast is _parse_json:
                text.encode("utf-8")  # fails for half of a UTF-16 pair, which the other parser refuses
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return texts


def _parse_json(line: bytes) -> Any:
    """Python's parser, which would guess the encoding of bytes and accept half of the lines of a UTF-16 file."""
    return json.loads(line.decode("utf-8-sig", "surrogatepass"))


def _fast_parser() -> Callable[[bytes], Any]:
    try:
        from orjson import loads
    except ImportError:
        return _parse_json
    return loads


_parse_fast = _fast_parser()


def _parse(where: str, line: bytes) -> Record | Fault | None:
    """The record of a line of JSON, None for a blank one."""
    if not line or line.isspace():
        return None
    try:
        value = _parse_json(line)
    except UnicodeDecodeError as error:
        return Fault(where, f"not UTF-8: {error.reason} at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return Fault(where, f"not valid JSON: {error}")
    return _record(where, value)


def _record(where: str, value: Any) -> Record | Fault:
    if not isinstance(value, Mapping):
        return Fault(where, f"expected an object with keys, found {json_kind(value)}")
    return Record(where, value)


def _document(where: str, record: Mapping[str, Any], keys: Sequence[str]) -> Document | Fault:
    texts = {}
    for key in keys:
        if key not in record:
            return Fault(where, f"no key {key!r}.{nearest(key, list(record))} The record has: {', '.join(record)}")
        text = record[key]
        if not isinstance(text, str):
            return Fault(where, f"key {key!r} holds {json_kind(text)}, not a string")
        texts[key] = replace_surrogates(text)
    return Document(where, texts)


def json_kind(value: Any) -> str:
    """The kind of a value in the words of JSON."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true/false", type(None): "null"}
    names[bytes] = "bytes (a binary column: cast it to strings)"
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def replace_surrogates(text: str) -> str:
    """U+FFFD for halves of UTF-16 pairs, which JSON escapes can spell and no tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
