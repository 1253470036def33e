"""Readers of text corpora: JSON lines (plain or compressed), plain text, parquet and arrow.

A reader cuts its file into chunks in file order. Cutting is cheap and done by one process; the worker that gets a chunk
parses it, which is the expensive part. Reading can begin between any two chunks (`Position`) and, where the format
allows it, be limited to what starts in a range of a file's bytes (`Part`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from megatron.data.tokenise.chunks import BATCH_ROWS, Chunk, FilesChunk, LineChunk, Position, RowChunk, RowGroupChunk
from megatron.data.tokenise.compression import COMPRESSIONS, ending_of, open_input
from megatron.errors import UserError
from megatron.files import refuse_lfs_pointer

CHUNK_BYTES = 1 << 18  # small enough to share a few megabytes among workers, large enough to hide the cost of sending
GROUP_BYTES = 1 << 27  # a larger row group is cut; the cost: the rows before a piece are decoded again

START = Position()

Cut = tuple[Chunk, Position]
"""A chunk, and where reading continues after it (`read_parts` fills in `Position.file`)."""


@dataclass(frozen=True)
class Part:
    """The records that start in bytes `[start, stop)` of a file (`stop` None: to the end).

    Only the kinds in `SPLITTABLE` can be read in parts.
    """

    path: Path
    start: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        """Its bytes of the file on disk."""
        return (self.path.stat().st_size if self.stop is None else self.stop) - self.start

    def holds(self, at: float) -> bool:
        """Whether a record that starts at byte `at` belongs to it."""
        return self.start <= at and (self.stop is None or at < self.stop)


def json_lines(part: Part, begin: Position = START) -> Iterator[Cut]:
    """Chunks of a file with one JSON object per line."""
    path = part.path
    with open_input(path) as (file, position):
        origin = _line_start(file, part.start)
        stop = None if part.stop is None else _line_start(file, part.stop)
        offset, number = (begin.offset, begin.number) if begin.offset else (origin, 1)
        if offset or stop is not None:  # looking for the borders has moved on
            _go_to(file, offset, by_reading=ending_of(path) in COMPRESSIONS)
        consumed, parts = position() if offset else 0, list[bytes]()
        while block := file.read(CHUNK_BYTES if stop is None else min(CHUNK_BYTES, stop - offset - _size(parts))):
            cut = block.rfind(b"\n") + 1
            if not cut:
                parts.append(block)  # a line longer than a block: joined once, at its end
                continue
            raw, now = b"".join([*parts, block[:cut]]), position()
            offset, first, number = offset + len(raw), number, number + raw.count(b"\n")
            yield (
                LineChunk(str(path), first, _no_mark(raw, offset), now - consumed, origin),
                Position(0, offset, number),
            )
            consumed, parts = now, [block[cut:]]
        if raw := b"".join(parts):
            offset += len(raw)
            last = LineChunk(str(path), number, _no_mark(raw, offset), position() - consumed, origin)
            yield last, Position(0, offset, number + 1)


def _no_mark(raw: bytes, end: int) -> bytes:
    """Without the byte order mark at the start of a file, which is not JSON."""
    return raw.removeprefix(b"\xef\xbb\xbf") if end == len(raw) else raw


def _size(parts: Sequence[bytes]) -> int:
    return sum(map(len, parts))


def _line_start(file: IO[bytes], at: int) -> int:
    """The start of the first line that starts at or after byte `at` of a plain file (its end when there is none)."""
    if not at:
        return 0
    at = file.seek(at - 1)
    while block := file.read(1 << 16):
        cut = block.find(b"\n") + 1
        if cut:
            return at + cut
        at += len(block)
    return at


def _go_to(file: IO[bytes], offset: int, by_reading: bool) -> None:
    """Skip to byte `offset` of the content; a compressed file must be read up to there."""
    if not by_reading:
        file.seek(offset)
        return
    while offset and (block := file.read(min(offset, 1 << 20))):
        offset -= len(block)


def json_file(part: Part, begin: Position = START) -> Iterator[Cut]:
    """Chunks of a `.json` file: one list of objects (read whole), or JSON lines under that name."""
    path = part.path
    with open_input(path) as (file, _):
        start = file.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        yield from json_lines(part, begin)
        return
    with open_input(path) as (file, _):
        try:
            rows = json.loads(file.read())
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not valid JSON: {error}. For one object per line, name it .jsonl") from error
    size = path.stat().st_size
    for first in range(begin.offset, len(rows), BATCH_ROWS):
        some = rows[first : first + BATCH_ROWS]
        yield RowChunk(str(path), first, some, size * len(some) // len(rows)), Position(0, first + len(some))


def text_files(paths: Iterable[Path]) -> Iterator[FilesChunk]:
    """Chunks of plain text files, one document each; small files share a chunk."""
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


def parquet(part: Part, begin: Position = START) -> Iterator[Cut]:
    """Chunks of a parquet file: its row groups, large ones in several pieces of rows."""
    path, pyarrow = part.path, _pyarrow(part.path)
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
            groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            shapes = [(group.num_rows, group.total_byte_size) for group in groups]
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a parquet file: {error}") from error
    size, total, first = path.stat().st_size, sum(rows for rows, _ in shapes), 0
    for group, (count, nbytes) in enumerate(shapes):
        step = max(1, count // max(1, nbytes // GROUP_BYTES))
        for start in range(0, count, step):
            at, rows = first + start, min(step, count - start)
            if at >= begin.offset and part.holds(size * at / total):
                share = size * (at + rows) // total - size * at // total
                yield RowGroupChunk(str(path), group, first, share, start, rows), Position(0, at + rows)
        first += count


def arrow(part: Part, begin: Position = START) -> Iterator[Cut]:
    """Chunks of an arrow IPC file, in either of its forms (Hugging Face `datasets` writes the stream form)."""
    path, pyarrow = part.path, _pyarrow(part.path)
    try:
        with pyarrow.memory_map(str(path)) as source:
            first = 0
            for batch, low, high in _record_batches(pyarrow, source):
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    at, some = first + start, batch.slice(start, BATCH_ROWS)
                    if at >= begin.offset and part.holds(low + (high - low) * start / batch.num_rows):
                        share = (high - low) * some.num_rows // batch.num_rows
                        yield RowChunk(str(path), at, some.to_pylist(), share), Position(0, at + some.num_rows)
                first += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not an arrow IPC file: {error}") from error


def _record_batches(pyarrow: Any, source: Any) -> Iterator[tuple[Any, int, int]]:
    """The record batches of a file, each with its range of bytes (approximate in the form with an index)."""
    if source.read(6) == b"ARROW1":
        file, size = pyarrow.ipc.open_file(source), source.size()
        for index in range(file.num_record_batches):
            low, high = (size * i // file.num_record_batches for i in (index, index + 1))
            yield file.get_batch(index), low, high
    else:
        source.seek(0)
        with pyarrow.ipc.open_stream(source) as stream:
            low = 0  # the schema counts as part of the first batch
            for batch in stream:
                high = source.tell()
                yield batch, low, high
                low = high


def text_file(part: Part, begin: Position = START) -> Iterator[Cut]:
    """A plain text file, which is one document."""
    if not begin.offset:
        yield from ((chunk, Position(0, 1)) for chunk in text_files([part.path]))


READERS: dict[str, Callable[[Part, Position], Iterator[Cut]]] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_file,
    ".txt": text_file,
    ".parquet": parquet,
    ".arrow": arrow,
}
TEXTS = (
    *(".txt", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".html", ".htm", ".xml", ".yml", ".yaml", ".toml"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".swift"),
    *(
        ".js",
        ".jsx",
        ".ts",
        ".tsx",
        ".css",
        ".sql",
        ".rb",
        ".php",
        ".pl",
        ".lua",
        ".r",
        ".jl",
        ".f90",
        ".sh",
        ".hs",
        ".ml",
    ),
)
"""Kinds of plain text. All but `.txt` only where `find_inputs` is asked for them."""
SPLITTABLE = (".jsonl", ".ndjson", ".parquet", ".arrow")


def kind_of(path: Path) -> str:
    """A file's extension without that of its compression, in lower case: `.jsonl` of `a.JSONL.zst`."""
    return ending_of(path.with_suffix("") if ending_of(path) in COMPRESSIONS else path)


def reader_of(path: Path) -> Callable[[Part, Position], Iterator[Cut]] | None:
    """What reads a file, None for one of an unknown kind."""
    kind = kind_of(path)
    return text_file if kind in TEXTS else READERS.get(kind)


def splittable(path: Path) -> bool:
    """Whether a part of the file can be read: not of a compressed file, nor of a single document."""
    return ending_of(path) in SPLITTABLE


def read_chunks(paths: Sequence[Path]) -> Iterator[Chunk]:
    """The chunks of several files, one file after the other."""
    return (chunk for chunk, _ in read_parts([Part(path) for path in paths]))


def read_parts(parts: Sequence[Part], begin: Position = START) -> Iterator[Cut]:
    """The chunks of several parts of files, one after the other, from a position that an earlier reading gave."""
    for part in parts[begin.file :]:
        refuse_lfs_pointer(part.path)
    # Neighbouring text files go to one reader, so that small ones share chunks.
    kinds = itertools.groupby(range(begin.file, len(parts)), key=lambda index: reader_of(parts[index].path))
    for reader, group in kinds:
        indices = list(group)
        assert reader is not None  # `find_inputs` gives no others
        if reader is text_file:
            done = indices[0]
            for files in text_files(parts[index].path for index in indices):
                done += len(files.paths)
                yield files, Position(done)
            continue
        for index in indices:
            for chunk, after in reader(parts[index], begin if index == begin.file else Position()):
                yield chunk, replace(after, file=index)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(f"{path}: needs pyarrow: pip install pyarrow") from error
    return pyarrow
