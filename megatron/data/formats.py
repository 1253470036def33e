"""Readers of text corpora: JSON lines (plain or compressed), plain text, parquet and arrow.

A reader cuts its file into chunks in file order. Cutting is cheap and happens in one process; a chunk's documents are
parsed wherever the chunk is sent, so that workers share the expensive part.
"""

from __future__ import annotations

import glob
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.data.chunks import BATCH_ROWS, Chunk, FilesChunk, LineChunk, RowChunk, RowGroupChunk
from megatron.data.compression import COMPRESSIONS, open_input
from megatron.errors import UserError

CHUNK_BYTES = 1 << 18  # small enough to share a few megabytes among workers, large enough to hide the cost of sending


def json_lines(path: Path) -> Iterator[Chunk]:
    """Chunks of a file with one JSON object per line."""
    with open_input(path) as (file, position):
        number, consumed, parts = 1, 0, [file.read(3).removeprefix(b"\xef\xbb\xbf")]  # a byte order mark is no JSON
        while block := file.read(CHUNK_BYTES):
            cut = block.rfind(b"\n") + 1
            if not cut:
                parts.append(block)  # a line longer than a block: joined once, at its end
                continue
            raw, now = b"".join([*parts, block[:cut]]), position()
            yield LineChunk(str(path), number, raw, now - consumed)
            number, consumed, parts = number + raw.count(b"\n"), now, [block[cut:]]
        if rest := b"".join(parts):
            yield LineChunk(str(path), number, rest, position() - consumed)


def json_file(path: Path) -> Iterator[Chunk]:
    """Chunks of a `.json` file: one list of objects (read whole), or JSON lines under that name."""
    with open_input(path) as (file, _):
        start = file.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        yield from json_lines(path)
        return
    with open_input(path) as (file, _):
        try:
            rows = json.loads(file.read())
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not valid JSON: {error}. For one object per line, name it .jsonl") from error
    size = path.stat().st_size
    for first in range(0, len(rows), BATCH_ROWS):
        part = rows[first : first + BATCH_ROWS]
        yield RowChunk(str(path), first, part, size * len(part) // len(rows))


def text_files(paths: Iterable[Path]) -> Iterator[Chunk]:
    """Chunks of plain text files, each of which is one document; small files share a chunk."""
    together: list[str] = []
    size = 0
    for path in paths:
        together.append(str(path))
        size += path.stat().st_size
        if size >= CHUNK_BYTES:
            yield FilesChunk(tuple(together), size)
            together, size = [], 0
    if together:
        yield FilesChunk(tuple(together), size)


def parquet(path: Path) -> Iterator[Chunk]:
    """One chunk per row group of a parquet file."""
    pyarrow = _pyarrow(path)
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a parquet file: {error}") from error
    size, total, first = path.stat().st_size, sum(rows), 0
    for group, count in enumerate(rows):
        if count:
            yield RowGroupChunk(str(path), group, first, size * count // total)
        first += count


def arrow(path: Path) -> Iterator[Chunk]:
    """Chunks of an arrow IPC file, in either of its forms (Hugging Face `datasets` writes the stream form)."""
    pyarrow = _pyarrow(path)
    try:
        with pyarrow.memory_map(str(path)) as source:
            first = 0
            for batch in _record_batches(pyarrow, source):
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    part = batch.slice(start, BATCH_ROWS)
                    yield RowChunk(str(path), first + start, part.to_pylist(), part.nbytes)
                first += batch.num_rows
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not an arrow IPC file: {error}") from error


def _record_batches(pyarrow: Any, source: Any) -> Iterator[Any]:
    if source.read(6) == b"ARROW1":
        file = pyarrow.ipc.open_file(source)
        for index in range(file.num_record_batches):
            yield file.get_batch(index)
    else:
        source.seek(0)
        yield from pyarrow.ipc.open_stream(source)


def one_by_one(reader: Callable[[Path], Iterator[Chunk]]) -> Callable[[Iterable[Path]], Iterator[Chunk]]:
    """A reader of several files from a reader of one."""
    return lambda paths: itertools.chain.from_iterable(map(reader, paths))


READERS: dict[str, Callable[[Iterable[Path]], Iterator[Chunk]]] = {
    ".jsonl": one_by_one(json_lines),
    ".ndjson": one_by_one(json_lines),
    ".json": one_by_one(json_file),
    ".txt": text_files,
    ".parquet": one_by_one(parquet),
    ".arrow": one_by_one(arrow),
}


def find_inputs(names: Iterable[str]) -> list[Path]:
    """The files that command-line inputs mean: paths, comma-joined lists, globs, folders (every file of a known kind).

    The order given is kept; what a glob or a folder stands for comes sorted by name. Raises `UserError` when a name
    stands for nothing or a file is of an unknown kind.
    """
    found: list[Path] = []
    for name in names:
        for part in [name] if Path(name).exists() else [part for part in name.split(",") if part]:
            found += _expand(part)
    for path in found:
        reader_of(path)
    return found


def reader_of(path: Path) -> Callable[[Iterable[Path]], Iterator[Chunk]]:
    """The reader for a file's extension. Raises `UserError` with the list of those known."""
    reader = READERS.get(kind_of(path))
    if reader is None:
        raise UserError(
            f"{path}: unknown kind of file. Known: {', '.join(READERS)}, and all but the last two also compressed as "
            f"{', '.join(COMPRESSIONS)}"
        )
    return reader


def kind_of(path: Path) -> str:
    """A file's extension without that of a compression: `.jsonl` of `a.jsonl.zst`."""
    return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix


def read_chunks(paths: Sequence[Path]) -> Iterator[Chunk]:
    """The chunks of several files, one file after the other."""
    for reader, group in itertools.groupby(paths, key=reader_of):
        yield from reader(group)


def _expand(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and kind_of(file) in READERS)
        if not files:
            raise UserError(f"{name}: no file of a known kind in this folder. Known: {', '.join(READERS)}")
        return files
    if path.exists():
        return [path]
    matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
    if not matches:
        raise UserError(f"{name}: no such file" + (" (no match)" if glob.has_magic(name) else ""))
    return matches


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(f"{path}: needs pyarrow, which comes with datasets (requirements/requirements.txt)") from error
    return pyarrow
