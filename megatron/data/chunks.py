"""Pieces of a corpus that can be sent to a worker, and the documents inside them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.compression import open_input
from megatron.errors import UserError, nearest

BATCH_ROWS = 256


@dataclass(frozen=True)
class Record:
    """One parsed record, and where it stands (`file:line`, `file` or `file, row n`)."""

    where: str
    value: Mapping[str, Any]


@dataclass(frozen=True)
class Document:
    """The texts of one record by key, and where it stands (`file:line`, `file` or `file, row n`)."""

    where: str
    texts: Mapping[str, str]


@dataclass(frozen=True)
class Fault:
    """A record that cannot be used: where it stands and why."""

    where: str
    reason: str


class Chunk(ABC):
    """A run of records of one file. `nbytes` is the share of the file on disk it stands for (progress only)."""

    nbytes: int

    @abstractmethod
    def records(self, columns: Sequence[str] | None = None) -> Iterator[Record | Fault]:
        """The records in order, blank lines left out. `columns`: those needed, None for all (others may come too).

        Raises `UserError` when a column that is asked for is in no record of the file and the format can tell.
        """

    def documents(self, keys: Sequence[str]) -> Iterator[Document | Fault]:
        """The records in order, each with the text of every key; a blank line counts as an empty document."""
        for record in self.records(keys):
            yield record if isinstance(record, Fault) else _document(record.where, record.value, keys)


@dataclass(frozen=True)
class LineChunk(Chunk):
    """Whole lines of JSON; `first` is the number of the first one, counted from 1."""

    path: str
    first: int
    raw: bytes
    nbytes: int

    def records(self, columns: Sequence[str] | None = None) -> Iterator[Record | Fault]:
        """One record per line that is not blank."""
        return (parsed for where, line in self._lines() if (parsed := _parse(where, line)) is not None)

    def documents(self, keys: Sequence[str]) -> Iterator[Document | Fault]:
        """One document per line; a blank line counts as an empty document."""
        for where, line in self._lines():
            record = _parse(where, line)
            if record is None:
                yield Document(where, dict.fromkeys(keys, ""))
            else:
                yield record if isinstance(record, Fault) else _document(where, record.value, keys)

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        lines = self.raw.removesuffix(b"\n").split(b"\n")
        return ((f"{self.path}:{number}", line) for number, line in enumerate(lines, start=self.first))


@dataclass(frozen=True)
class RowChunk(Chunk):
    """Records that are already in memory; `first` is the number of the first one, counted from 0."""

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
    """One row group of a parquet file, read where the chunk is used; only the columns asked for are."""

    path: str
    group: int
    first: int
    nbytes: int

    def records(self, columns: Sequence[str] | None = None) -> Iterator[Record | Fault]:
        """One record per row."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path) as file:
            names = file.schema_arrow.names
            wanted = None if columns is None else list(columns)
            for key in wanted or ():
                if key not in names:
                    raise UserError(f"{self.path}: no column {key!r}.{nearest(key, names)} It has: {', '.join(names)}")
            number = self.first
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[self.group], columns=wanted):
                yield from RowChunk(self.path, number, batch.to_pylist(), 0).records()
                number += batch.num_rows


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
            yield Record(path, {"text": text.replace("\r\n", "\n")})


def _parse(where: str, line: bytes) -> Record | Fault | None:
    """The record of a line of JSON, None for a blank one."""
    if not line or line.isspace():
        return None
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        return Fault(where, f"not UTF-8: {error.reason} at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return Fault(where, f"not valid JSON: {error}")
    return _record(where, value)


def _record(where: str, value: Any) -> Record | Fault:
    if not isinstance(value, Mapping):
        return Fault(where, f"expected an object with keys, found {_kind(value)}")
    return Record(where, value)


def _document(where: str, record: Mapping[str, Any], keys: Sequence[str]) -> Document | Fault:
    texts = {}
    for key in keys:
        if key not in record:
            return Fault(where, f"no key {key!r}.{nearest(key, list(record))} The record has: {', '.join(record)}")
        text = record[key]
        if not isinstance(text, str):
            return Fault(where, f"key {key!r} holds {_kind(text)}, not a string")
        texts[key] = _without_surrogates(text)
    return Document(where, texts)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true/false", type(None): "null"}
    return names.get(type(value), "a number")


def _without_surrogates(text: str) -> str:
    """JSON escapes can spell half a UTF-16 pair, which is no character and which no tokenizer takes: U+FFFD instead."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
