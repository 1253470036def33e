"""The work on a dataset's records: counted, exported as JSON lines, by worker processes and in order."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.hub.columns import Layout, Unusable
from megatron.data.hub.source import Source
from megatron.data.sample import IGNORE
from megatron.data.tokenise.chunks import Chunk, Fault, Record
from megatron.data.tokenise.encode import SHOWN_FAULTS, ChunkEncoder
from megatron.data.tokenise.worker_pool import ordered_map
from megatron.errors import DeepyError, UserError
from megatron.log import get_logger

LINE_SECONDS, BAR_SECONDS = 5.0, 0.1  # between two lines, and two redraws of a bar

logger = get_logger(__name__)


@dataclass
class Counts:
    """Of a piece of the data or all of it. `tokens` and `trained` stay 0 where nothing is tokenised."""

    documents: int = 0
    empty: int = 0
    bad: int = 0
    tokens: int = 0
    trained: int = 0
    nbytes: int = 0
    faults: list[Fault] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Count another piece in."""
        for name in ("documents", "empty", "bad", "tokens", "trained", "nbytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.faults = (self.faults + other.faults)[:SHOWN_FAULTS]


@dataclass(frozen=True)
class Renderer:
    """Turns pieces of a source into the lines of the export; see `Layout.render`."""

    source: Source
    layout: Layout
    skip_bad: bool = False

    def __call__(self, piece: Any) -> tuple[list[Record], Counts]:
        """The lines of a piece. Raises `UserError` for a record that cannot be used, unless such are left out."""
        lines: list[Record] = []
        counts = Counts(nbytes=piece.nbytes)
        for record in self.source.records(piece, self._columns):
            try:
                if isinstance(record, Fault):
                    raise Unusable(record.reason)
                line = self.layout.render(record.value)
            except Unusable as error:
                self._refuse(Fault(record.where, str(error)), counts)
                continue
            if line is None:
                counts.empty += 1
            else:
                lines.append(Record(record.where, line))
        counts.documents = len(lines)
        return lines, counts

    @property
    def _columns(self) -> list[str]:
        tools = self.layout.kind == "messages" and "tools" in self.source.columns
        return [*self.layout.columns, *(["tools"] if tools else [])]

    def _refuse(self, fault: Fault, counts: Counts) -> None:
        if not self.skip_bad:
            raise UserError(f"{fault.where}: {fault.reason}. (--skip-bad-lines leaves such records out)")
        counts.bad += 1
        if len(counts.faults) < SHOWN_FAULTS:
            counts.faults.append(fault)


@dataclass(frozen=True)
class RenderedChunk(Chunk):
    """Lines of the export that were not written anywhere."""

    lines: list[Record]
    nbytes: int

    def records(self, columns: Any = None) -> Iterator[Record | Fault]:
        """The lines."""
        return iter(self.lines)


@dataclass(frozen=True)
class _Counter:
    """Counts the tokens of a piece, as the encoder would write them."""

    renderer: Renderer
    encoder: ChunkEncoder
    alone: bool

    def __call__(self, piece: Any) -> Counts:
        if not self.alone:  # workers share the cores already; the library reads this name from the C environment
            os.putenv("TOKENIZERS_PARALLELISM", "false")
        lines, counts = self.renderer(piece)
        encoded = self.encoder.encode(RenderedChunk(lines, piece.nbytes))
        tally = encoded.tally
        counts.documents, counts.tokens = tally.documents[0], tally.tokens[0]
        counts.trained = counts.tokens if len(encoded.ids) == 1 else int(np.sum(encoded.ids[1] != IGNORE))
        # The encoder leaves out more: what its normaliser makes empty, chats in which nothing is trained.
        counts.empty, counts.bad = counts.empty + tally.empty[0], counts.bad + tally.faults
        counts.faults = (counts.faults + tally.first_faults)[:SHOWN_FAULTS]
        return counts


@dataclass(frozen=True)
class _Exporter:
    """Turns a piece into the bytes of its lines."""

    renderer: Renderer

    def __call__(self, piece: Any) -> tuple[bytes, Counts]:
        lines, counts = self.renderer(piece)
        return b"".join(_json_line(line.value) for line in lines), counts


def count(renderer: Renderer, encoder: ChunkEncoder, workers: int) -> Counts:
    """How many documents and tokens the export will have. Raises `UserError` when it would have none."""
    counts = Counts()
    with StageProgress("counting", renderer.source.nbytes) as report:
        for part in _map(_Counter(renderer, encoder, workers <= 1), renderer.source, workers):
            counts.add(part)
            report(counts)
    _require_documents(counts, renderer)
    return counts


def export(renderer: Renderer, path: Path, workers: int) -> tuple[Counts, str]:
    """Write the export to `path`, which appears when it is complete; returns what is in it and its SHA-256.

    Raises `UserError` when there is no document, `DeepyError` when it cannot be written. Nothing is left behind then.
    """
    counts, digest = Counts(), hashlib.sha256()
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    file = None
    try:
        with StageProgress("exporting", renderer.source.nbytes) as report:
            for part, of_part in _map(_Exporter(renderer), renderer.source, workers):
                counts.add(of_part)
                if part:
                    if file is None:  # not earlier: data without a document leaves no folder behind
                        path.parent.mkdir(parents=True, exist_ok=True)
                        file = temp.open("wb")
                    file.write(part)
                    digest.update(part)
                report(counts)
        _require_documents(counts, renderer)
        if file is not None:
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(temp, path)
    except OSError as error:  # a full disk is nobody's bug
        raise DeepyError(f"cannot write {path}: {error.strerror}. Nothing was written.") from error
    finally:
        if file is not None:
            with suppress(OSError):  # on a full disk what is still buffered fails again
                file.close()
        temp.unlink(missing_ok=True)
    return counts, digest.hexdigest()


def name_faults(counts: Counts) -> None:
    """Say what was left out."""
    for fault in counts.faults:
        logger.warning(f"left out {fault.where}: {fault.reason}")
    if counts.bad > len(counts.faults):
        logger.warning(f"... and {counts.bad - len(counts.faults)} more")
    if counts.empty or counts.bad:
        logger.info(f"left out: {counts.empty} empty documents, {counts.bad} unusable records")


def _map(function: Callable[[Any], Any], source: Source, workers: int) -> Iterator[Any]:
    return map(function, source.pieces()) if workers <= 1 else ordered_map(function, source.pieces(), workers)


def _json_line(value: Any) -> bytes:
    """One line; what UTF-8 cannot hold (halves of UTF-16 pairs, from JSON escapes) stays escaped."""
    line = json.dumps(value, ensure_ascii=False, default=str)
    try:
        return line.encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value, default=str).encode() + b"\n"


def _require_documents(counts: Counts, renderer: Renderer) -> None:
    if not counts.documents:
        columns = ", ".join(renderer.layout.columns)
        raise UserError(f"no document in column {columns}: {counts.empty} empty ones, {counts.bad} unusable records")


class StageProgress:
    """A bar on a terminal, a line every few seconds elsewhere. Call it with the running counts."""

    def __init__(self, what: str, nbytes: int) -> None:
        self.what, self.goal = what, nbytes
        self.started = self.shown = time.monotonic()
        self.counts = Counts()
        self.bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=nbytes, desc=what, unit="B", unit_scale=True, dynamic_ncols=True)

    def __enter__(self) -> StageProgress:
        return self

    def __exit__(self, failure: Any, *rest: object) -> None:
        if self.bar is not None:
            if failure is None:
                self._draw()
            self.bar.close()
        if failure is None:
            logger.info(f"{self.what}: done in {self._seconds():.1f} s, {self._rates()}")

    def __call__(self, counts: Counts) -> None:
        """Show the running counts, when enough time has passed since the last time."""
        self.counts, now = counts, time.monotonic()
        if now - self.shown < (LINE_SECONDS if self.bar is None else BAR_SECONDS):
            return
        self.shown = now
        if self.bar is not None:
            self._draw()
        else:
            share = min(counts.nbytes / self.goal, 1.0) if self.goal else 0.0
            left = f", {self._seconds() * (1 - share) / share:.0f} s left" if share else ""
            logger.info(f"{self.what}: {100 * share:.0f} %{left}, {self._rates()}")

    def _draw(self) -> None:
        self.bar.set_postfix_str(self._rates(), refresh=False)
        self.bar.update(self.counts.nbytes - self.bar.n)

    def _seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    def _rates(self) -> str:
        tokens = f", {self.counts.tokens} tokens" if self.counts.tokens else ""
        return f"{self.counts.documents} documents{tokens}, {self.counts.nbytes / self._seconds() / 1e6:.1f} MB/s"
