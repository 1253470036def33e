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
    def documents(self, keys: Sequence[str]) -> Iterator[Document | Fault]:
        """The records in order, each with the text of every key."""


@dataclass(frozen=True)
class LineChunk(Chunk):
    """Whole lines of JSON; `first` is the number of the first one, counted from 1."""

    path: str
    first: int
    raw: bytes
    nbytes: int

    def documents(self, keys: Sequence[str]) -> Iterator[Document | Fault]:
        """One document per line; a blank line counts as an empty document."""
        lines = self.raw.removesuffix(b"\n").split(b"\n")
        for number, line in enumerate(lines, start=self.first):
            where = f"{self.path}:{number}"
            if not line or line.isspace():
                yield Document(where, dict.fromkeys(keys, ""))
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield Fault(where, f"not valid JSON: {error}")
                continue
            yield _document(where, record, keys)


@dataclass(frozen=True)
class RowChunk(Chunk):
    """Records that are already in memory; `first` is the number of the first one, counted from 0."""

    path: str
    first: int
    rows: Sequence[Mapping[str, Any]]
    nbytes: int

    def documents(self, keys: Sequence[str]) -> Iterator[Document | Fault]:
        """One document per row."""
        for number, row in enumerate(self.rows, start=self.first):
            yield _document(f"{self.path}, row {number}", row, keys)


@dataclass(frozen=True)
class RowGroupChunk(Chunk):
    """One row group of a parquet file, read where the chunk is used; only the columns asked for are."""

    path: str
    group: int
    first: int
    nbytes: int

    def documents(self, keys: Sequence[str]) -> Iterator[Document | Fault]:
        """One document per row."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path) as file:
            names = file.schema_arrow.names
            for key in keys:
                if key not in names:
                    raise UserError(f"{self.path}: no column {key!r}.{nearest(key, names)} It has: {', '.join(names)}")
            number = self.first
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[self.group], columns=list(keys)):
                yield from RowChunk(self.path, number, batch.to_pylist(), 0).documents(keys)
                number += batch.num_rows


@dataclass(frozen=True)
class FilesChunk(Chunk):
    """Whole files of plain text, one document each, read where the chunk is used."""

    paths: tuple[str, ...]
    nbytes: int

    def documents(self, keys: Sequence[str]) -> Iterator[Document | Fault]:
        """One document per file, under the key "text"."""
        for path in self.paths:
            try:
                with open_input(Path(path)) as (file, _):
                    text = file.read().decode("utf-8-sig")
            except UnicodeDecodeError as error:
                yield Fault(path, f"not UTF-8: {error}")
                continue
            yield _document(path, {"text": text.replace("\r\n", "\n")}, keys)


def _document(where: str, record: Any, keys: Sequence[str]) -> Document | Fault:
    if not isinstance(record, Mapping):
        return Fault(where, f"expected an object with keys, found {_kind(record)}")
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
