"""The records of a Hugging Face dataset: from files that are read directly, or from an arrow table on disk.

`tokenise.formats` reads JSON lines and parquet: nothing is copied to a cache, and a record has the keys that the file
has (a column store would give every chat turn the keys of all others). Everything else (CSV, archives, slices of a
split, folders of `save_to_disk`) is read through `datasets`, which keeps it as memory-mapped arrow.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.data.tokenise.chunks import Chunk, Fault, Record, RowGroupChunk
from megatron.data.tokenise.formats import kind_of, read_chunks
from megatron.errors import UserError
from megatron.log import progress

SAMPLE_ROWS = 64  # records that detection looks at
PIECE_BYTES = 1 << 22  # how much of a table a worker gets at a time
GROUP_BYTES = 1 << 24  # how much of a parquet file; the rows before a piece are decoded again for it
HASHED_AT_ONCE = 1 << 22

# Kinds of files that are read directly. Not .txt: `datasets` makes a record of every line, and so does this tool.
RAW_KINDS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")

FileStamp = tuple[int, int, str]  # size, time of change in ns, SHA-256


@dataclass(frozen=True)
class Request:
    """What the user asks for: a Hub dataset or local path, and which part."""

    dataset: str
    subset: str | None = None
    split: str = "train"
    data_dir: str | None = None
    data_files: tuple[str, ...] = ()
    revision: str | None = None

    def describe(self) -> dict[str, Any]:
        """The request for manifests; local folders only by name."""
        return {"dataset": Path(self.dataset).name if Path(self.dataset).exists() else self.dataset} | {
            name: value
            for name in ("subset", "split", "data_dir", "revision")
            if (value := getattr(self, name)) is not None
        }


class Records(ABC):
    """The records of a dataset, in pieces for workers. Made once and sent to every worker; can be read again.

    `key` identifies the content: equal keys mean equal records. `nbytes`: sum of the pieces' `nbytes`; `documents`: the
    number of records where it is known beforehand.
    """

    key: str
    nbytes: int
    documents: int | None
    columns: tuple[str, ...]
    description: Mapping[str, Any]

    @abstractmethod
    def pieces(self) -> Iterator[Any]:
        """The pieces in order; each has `nbytes`."""

    @abstractmethod
    def read(self, piece: Any, columns: Sequence[str] | None) -> Iterator[Record | Fault]:
        """The records of a piece, with at least the columns named (None: all)."""

    @cached_property
    def sample(self) -> list[Mapping[str, Any]]:
        """The first usable records."""
        found = (record for piece in self.pieces() for record in self.read(piece, None))
        return [r.value for r in itertools.islice(found, SAMPLE_ROWS) if isinstance(r, Record)]


class FileRecords(Records):
    """The records of files that are read directly."""

    def __init__(self, paths: Sequence[Path], key: str, description: Mapping[str, Any]) -> None:
        """`key` as `Records.key`. Raises `UserError` when the files hold no record."""
        self.paths, self.key, self.description = list(paths), key, description
        self.nbytes, self.documents = sum(path.stat().st_size for path in paths), None
        names: dict[str, None] = {}
        for record in self.sample:
            names |= dict.fromkeys(record)
        self.columns = tuple(names)

    def pieces(self) -> Iterator[Chunk]:
        """Chunks of the files."""
        return (piece for chunk in read_chunks(self.paths) for piece in _cut(chunk))

    def read(self, piece: Chunk, columns: Sequence[str] | None) -> Iterator[Record | Fault]:
        """The records of a chunk."""
        return piece.records(columns)


def _cut(chunk: Chunk) -> Iterator[Chunk]:
    """Cut a large chunk of parquet: whole, it would be held as text, in every worker and a few times here."""
    if not isinstance(chunk, RowGroupChunk) or chunk.rows is None or chunk.nbytes <= GROUP_BYTES:
        yield chunk
        return
    step = max(1, chunk.rows * GROUP_BYTES // chunk.nbytes)
    for at in range(0, chunk.rows, step):
        rows = min(step, chunk.rows - at)
        share = chunk.nbytes * (at + rows) // chunk.rows - chunk.nbytes * at // chunk.rows
        yield replace(chunk, start=chunk.start + at, rows=rows, nbytes=share)


@dataclass(frozen=True)
class Rows:
    """Rows `start` to `stop` of a table."""

    start: int
    stop: int
    nbytes: int


class TableRecords(Records):
    """A `datasets.Dataset`, which maps its arrow files into memory."""

    def __init__(self, table: Any, name: str, key: str, description: Mapping[str, Any], batch_size: int) -> None:
        """`name` is for messages; a piece has at most `batch_size` rows.

        Columns of images, sounds and the like are dropped: they hold no text, and decoding them needs more packages.
        """
        media = [name for name, feature in (table.features or {}).items() if getattr(feature, "decode", False) is True]
        table = table.remove_columns(media)
        self.table, self.name, self.key, self.description = table, name, key, description
        self.columns, self.documents = tuple(table.column_names), len(table)
        self.nbytes = int(table.data.nbytes * len(table) / max(table.data.num_rows, 1))
        self.rows = min(batch_size, max(1, len(table) * PIECE_BYTES // max(self.nbytes, 1)))

    def pieces(self) -> Iterator[Rows]:
        """Ranges of rows."""
        total = len(self.table)
        for start in range(0, total, self.rows):
            stop = min(start + self.rows, total)
            yield Rows(start, stop, self.nbytes * stop // total - self.nbytes * start // total)

    def read(self, piece: Rows, columns: Sequence[str] | None) -> Iterator[Record | Fault]:
        """The rows of a range."""
        table = self.table if columns is None else self.table.select_columns(list(columns))
        values = table[piece.start : piece.stop]
        for offset in range(piece.stop - piece.start):
            row = {name: column[offset] for name, column in values.items()}
            yield Record(f"{self.name}, row {piece.start + offset}", row)


@dataclass
class Stamps:
    """SHA-256 of local files. A file whose size and time of change are those in `known` is not read again."""

    known: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    seen: dict[str, FileStamp] = field(default_factory=dict)

    def of(self, path: Path) -> str:
        """The digest of a file's content."""
        name, stat = str(path.resolve()), path.stat()
        size, changed, digest = tuple(self.known.get(name, (-1, -1, "")))
        if (size, changed) != (stat.st_size, stat.st_mtime_ns):
            digest = sha256_file(path)
        self.seen[name] = (stat.st_size, stat.st_mtime_ns, digest)
        return digest

    def key(self, paths: Sequence[Path], *more: Any) -> str:
        """One key for the content of several files."""
        return content_key(
            "files", [self.of(path) for path in progress(paths, what="reading the input", unit="files")], *more
        )


def is_raw(path: Path | str) -> bool:
    """Whether files of this name are read directly."""
    return kind_of(Path(path)) in RAW_KINDS


def content_key(*parts: Any) -> str:
    """A digest of JSON-able values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content. Raises `UserError` when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(HASHED_AT_ONCE):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()
