"""The work on a dataset's records: counting and exporting as JSON lines, by worker processes and in order."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.hub.layout import Layout, Unusable
from megatron.data.hub.records import Records
from megatron.data.sample import IGNORE
from megatron.data.tokenise.chunks import Chunk, Fault, Record
from megatron.data.tokenise.encode import ChunkEncoder, Tally
from megatron.data.tokenise.progress import TallyProgress
from megatron.data.tokenise.worker_pool import ordered_map
from megatron.errors import UserError, cannot_write


@dataclass(frozen=True)
class Renderer:
    """Turns pieces of a dataset into the lines of the export; see `Layout.render`."""

    records: Records
    layout: Layout
    skip_bad: bool = False

    def __call__(self, piece: Any) -> tuple[list[Record], Tally]:
        """The lines of a piece, counted. Raises `UserError` for an unusable record, unless they are to be skipped."""
        lines: list[Record] = []
        tally = Tally.zero(1, piece.nbytes)
        for record in self.records.read(piece, self._columns):
            try:
                if isinstance(record, Fault):
                    raise Unusable(record.reason)
                line = self.layout.render(record.value)
            except Unusable as error:
                tally.refuse(Fault(record.where, str(error)), self.skip_bad)
                continue
            if line is None:
                tally.empty[0] += 1
            else:
                lines.append(Record(record.where, line))
        tally.documents[0] = len(lines)
        return lines, tally

    @property
    def _columns(self) -> list[str]:
        tools = self.layout.kind == "messages" and "tools" in self.records.columns
        return [*self.layout.columns, *(["tools"] if tools else [])]

    def map(self, function: Callable[[Any], Any], workers: int) -> Iterator[Any]:
        """`function` of every piece, in order."""
        pieces = self.records.pieces()
        return map(function, pieces) if workers <= 1 else ordered_map(function, pieces, workers)

    def require_documents(self, tally: Tally) -> None:
        """Raise `UserError` when no document was counted."""
        if not tally.documents[0]:
            columns, empty, bad = ", ".join(self.layout.columns), tally.empty[0], tally.faults
            raise UserError(f"no document in column {columns}: {empty} empty ones, {bad} unusable records")


@dataclass(frozen=True)
class RenderedChunk(Chunk):
    """Lines of the export that are only in memory."""

    lines: list[Record]
    nbytes: int

    def records(self, columns: Any = None) -> Iterator[Record | Fault]:
        """The lines."""
        return iter(self.lines)


@dataclass(frozen=True)
class _Counter:
    """Counts the tokens of a piece, as the encoder would write them, and how many of them are trained."""

    renderer: Renderer
    encoder: ChunkEncoder
    alone: bool

    def __call__(self, piece: Any) -> tuple[Tally, int]:
        if not self.alone:  # workers share the cores already; the library reads this name from the C environment
            os.putenv("TOKENIZERS_PARALLELISM", "false")
        lines, tally = self.renderer(piece)
        encoded = self.encoder.encode(RenderedChunk(lines, piece.nbytes))
        tally.documents[0], tally.tokens[0] = encoded.tally.documents[0], encoded.tally.tokens[0]
        # The encoder leaves out more: texts that its normaliser makes empty, chats in which nothing is trained.
        tally.empty[0] += encoded.tally.empty[0]
        tally.faults += encoded.tally.faults
        for fault in encoded.tally.first_faults:
            tally.list_fault(fault)
        return tally, tally.tokens[0] if len(encoded.ids) == 1 else int(np.sum(encoded.ids[1] != IGNORE))


@dataclass(frozen=True)
class _Exporter:
    renderer: Renderer

    def __call__(self, piece: Any) -> tuple[bytes, Tally]:
        lines, tally = self.renderer(piece)
        return b"".join(_json_line(line.value) for line in lines), tally


def count(renderer: Renderer, encoder: ChunkEncoder, workers: int) -> tuple[Tally, int]:
    """The counts of the export to be, and its trained tokens. Raises `UserError` when it would have no document."""
    total, trained = Tally.zero(1), 0
    with TallyProgress("counting", renderer.records.nbytes) as report:
        for tally, of_piece in renderer.map(_Counter(renderer, encoder, workers <= 1), workers):
            total.add(tally)
            trained += of_piece
            report(total)
    renderer.require_documents(total)
    return total, trained


def export(renderer: Renderer, path: Path, workers: int) -> tuple[Tally, str]:
    """Write the export to `path`, which appears when it is complete; returns its counts and its SHA-256.

    Raises `UserError` when there is no document or it may not be written, `MachineError` on a full disk; nothing is
    left behind then.
    """
    total, digest = Tally.zero(1), hashlib.sha256()
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    file = None
    try:
        with TallyProgress("exporting", renderer.records.nbytes) as report:
            for part, tally in renderer.map(_Exporter(renderer), workers):
                total.add(tally)
                if part:
                    if file is None:  # opened late: data without a document leaves no folder behind
                        path.parent.mkdir(parents=True, exist_ok=True)
                        file = temp.open("wb")
                    file.write(part)
                    digest.update(part)
                report(total)
        renderer.require_documents(total)
        if file is not None:
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(temp, path)
    except OSError as error:  # such as a full disk
        raise cannot_write(error, f"cannot write {path}: {error.strerror}. Nothing was written.") from error
    finally:
        if file is not None:
            with suppress(OSError):  # on a full disk, flushing fails again
                file.close()
        temp.unlink(missing_ok=True)
    return total, digest.hexdigest()


def _json_line(value: Any) -> bytes:
    """One line; what UTF-8 cannot hold (halves of UTF-16 pairs, from JSON escapes) stays escaped."""
    line = json.dumps(value, ensure_ascii=False, default=str)
    try:
        return line.encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value, default=str).encode() + b"\n"
