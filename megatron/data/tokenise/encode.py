"""From chunks of a corpus to token datasets: encoded, by worker processes if asked, and written in order.

A `ChunkEncoder` says what becomes of a chunk (`texts`, `masked_texts`, `chat.encoder`). The bytes written depend on the
input and the encoder only, never on the number of workers: chunks are cut before workers get them, and their results
are written in the same order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megatron.data.tokenise.chunks import Chunk, Fault
from megatron.data.tokenise.journal import Journal
from megatron.data.tokenise.worker_pool import ordered_map
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.manifest import Manifest, finalize_with_manifest
from megatron.data.tokens.partial import PARTIAL, WriteError
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.tokenizer import Tokenizer

SHOWN_FAULTS = 5  # how many of the records left out are listed; the rest is counted

logger = get_logger(__name__)


@dataclass(frozen=True)
class Output:
    """A dataset that an encoder makes.

    `suffix`: what follows the prefix in its name (`_text_document`); `dtype`: of the values stored; `key`: the records'
    key that it is made of; `extra`: entries of its manifest besides the counts; `holds_ids`: whether the values are ids
    of the tokenizer (or labels), False for rewards and the like; `framed`: whether the tokenizer put its own start and
    end around the texts, as it does except for chats.
    """

    suffix: str
    dtype: np.dtype
    key: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    holds_ids: bool = True
    framed: bool = False


@dataclass
class Tally:
    """Counts of a piece of the corpus; `documents`, `tokens`, `empty` and `text_bytes` are per output.

    `lost`: how many messages of chats have something that is not in the data, by what it is; `cut`: how many chats lost
    their end.
    """

    documents: list[int]
    tokens: list[int]
    empty: list[int]
    text_bytes: list[int]
    faults: int = 0
    first_faults: list[Fault] = field(default_factory=list)
    nbytes: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    cut: int = 0

    @classmethod
    def zero(cls, outputs: int, nbytes: int = 0) -> Tally:
        """Nothing counted yet, of a piece that stands for `nbytes` of the input."""
        return cls([0] * outputs, [0] * outputs, [0] * outputs, [0] * outputs, nbytes=nbytes)

    def add(self, other: Tally) -> None:
        """Count another piece in."""
        for name in ("documents", "tokens", "empty", "text_bytes"):
            setattr(self, name, [a + b for a, b in zip(getattr(self, name), getattr(other, name))])
        self.faults += other.faults
        self.first_faults = (self.first_faults + other.first_faults)[:SHOWN_FAULTS]
        self.nbytes += other.nbytes
        self.cut += other.cut
        self.lost = dict(Counter(self.lost) + Counter(other.lost))

    def count_lost(self, what: Iterable[str]) -> None:
        """Count messages of which something is not in the data."""
        self.lost = dict(Counter(self.lost) + Counter(what))

    def refuse(self, fault: Fault, skip: bool) -> None:
        """Count an unusable record if `skip`, else raise the `UserError` that says where it is."""
        if not skip:
            raise UserError(f"{fault.where}: {fault.reason}. (--skip-bad-lines leaves such records out)")
        self.faults += 1
        self.list_fault(fault)

    def list_fault(self, fault: Fault) -> None:
        """Add a record to those that `log_faults` lists, while there is room."""
        self.first_faults = [*self.first_faults, fault][:SHOWN_FAULTS]

    def log_faults(self) -> None:
        """Warn about the first records that were left out, with their number."""
        for fault in self.first_faults:
            logger.warning(f"left out {fault.where}: {fault.reason}")
        if self.faults > len(self.first_faults):
            logger.warning(f"... and {self.faults - len(self.first_faults)} more")

    def log_left_out(self) -> None:
        """Log how many records were left out, and what is left out of the messages of the others, if anything."""
        if any(self.empty) or self.faults:
            logger.info(f"left out: {sum(self.empty)} empty documents, {self.faults} unusable records")
        if self.cut:
            logger.info(f"cut to --max-length: {self.cut} chats")
        if self.lost:
            counts = ", ".join(f"{what} in {self.lost[what]}" for what in sorted(self.lost))
            logger.warning(f"the chat template does not write everything that the messages have: {counts} messages")


@dataclass(frozen=True)
class Encoded:
    """An encoded chunk: per output the concatenated values of its documents, and the length of each."""

    ids: list[np.ndarray]
    lengths: list[np.ndarray]
    tally: Tally


class ChunkEncoder(Protocol):
    """Turns chunks into values. It is made once and sent to every worker, so it must pickle.

    `outputs` describes what `encode` returns, in that order; the manifests name `tokenizer`.
    """

    @property
    def outputs(self) -> tuple[Output, ...]: ...
    @property
    def tokenizer(self) -> Tokenizer: ...

    def encode(self, chunk: Chunk) -> Encoded:
        """The values of a chunk. Raises `UserError` for a record that cannot be used (see `Tally.refuse`)."""


def encode_stream(chunks: Iterable[Chunk], encoder: ChunkEncoder, workers: int) -> Iterator[Encoded]:
    """The encoded chunks, in order; `workers` > 1: by that many processes.

    Raises what encoding the first failing chunk raises, and `DeepyError` when a worker dies.
    """
    if workers <= 1:
        return map(encoder.encode, chunks)
    return ordered_map(_InWorker(encoder), chunks, workers)


class _InWorker:
    """`ChunkEncoder.encode`, for a process that is one of many."""

    def __init__(self, encoder: ChunkEncoder) -> None:
        self.encoder = encoder

    def __call__(self, chunk: Chunk) -> Encoded:
        # The library starts a thread per core in every worker otherwise; it reads this name from the C environment.
        os.putenv("TOKENIZERS_PARALLELISM", "false")
        return self.encoder.encode(chunk)


def write_datasets(
    chunks: Iterable[Chunk],
    encoder: ChunkEncoder,
    prefix: str,
    *,
    workers: int = 1,
    source: Any = None,
    report: Callable[[Tally], None] = lambda tally: None,
    journal: Journal | None = None,
    shard: Mapping[str, Any] | None = None,
) -> tuple[list[Manifest], Tally]:
    """Encode `chunks` into one `.bin`/`.idx`/manifest per output of the encoder, named `prefix` + its suffix.

    The files get their final names at the end. On failure what was written is removed, unless `journal` (the chunks
    then come from its `watch`) can resume it. `report` is called with the running totals after every chunk. `shard`:
    what the manifests say about the shard that this is. Raises `UserError` when an output has no document, which only
    a shard may have.
    """
    with _Files(encoder, prefix, journal) as files:
        total = files.earlier
        for encoded in encode_stream(chunks, encoder, workers):
            total.add(encoded.tally)
            files.add(encoded, total)
            report(total)
        total.log_faults()
        if shard is None:
            files.require_documents(total)
        manifests = files.publish(total, source, {} if shard is None else {"shard": dict(shard)})
    return manifests, total


class _Files:
    """The datasets being written: all of them appear or none; what is unfinished is removed, or kept to be resumed."""

    def __init__(self, encoder: ChunkEncoder, prefix: str, journal: Journal | None) -> None:
        self.encoder, self.prefix, self.journal = encoder, prefix, journal
        self.builders: list[IndexedDatasetBuilder] = []
        self.earlier = Tally.zero(len(encoder.outputs))
        if journal and journal.saved:
            self.earlier = journal.read_counts(Tally)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        keep = bool(error and self.journal and self.journal.saved)
        for builder in self.builders:
            builder.close() if keep else builder.abort()
        if isinstance(error, WriteError):
            remedy = "Free some disk space and run the same command again to resume." if keep else ""
            raise WriteError(f"{error} {remedy or 'Nothing was written.'}") from error
        if keep:
            logger.warning(f"unfinished work is kept in {self.prefix}*{PARTIAL}: run the same command again to resume")

    def add(self, encoded: Encoded, total: Tally) -> None:
        """Append an encoded chunk, which `total` includes."""
        # Opened late: an empty corpus leaves no folder behind, and forked workers do not inherit the files.
        if not self.builders and any(total.documents):
            self._open()
        for builder, ids, lengths in zip(self.builders, encoded.ids, encoded.lengths):
            builder.add_documents(ids, lengths)
        if self.journal:
            self.journal.advance(total, self.builders)

    def require_documents(self, total: Tally) -> None:
        """Raise `UserError`, with nothing left behind, when there is nothing to write."""
        for output, documents, empty in zip(self.encoder.outputs, total.documents, total.empty):
            if not documents:
                if self.journal and self.journal.saved:
                    if not self.builders:
                        self._open()  # the earlier run's files, to remove them
                    self.journal.remove()
                bad = f", {total.faults} unusable records" if total.faults else ""
                raise UserError(
                    f"no document to write for key {output.key!r}: {empty} empty ones{bad}. Nothing was written."
                )

    def publish(self, total: Tally, source: Any, extra: Mapping[str, Any]) -> list[Manifest]:
        """Finish the files and give them their final names."""
        if not self.builders:
            self._open()
        for builder in self.builders:
            builder.finish()  # a full disk is found before any file has its final name
        if self.journal:
            self.journal.complete(total, self.builders)
        manifests = [_finish(builder, i, self.encoder, source, total, extra) for i, builder in enumerate(self.builders)]
        if self.journal:
            self.journal.remove()
        return manifests

    def _open(self) -> None:
        for index, output in enumerate(self.encoder.outputs):
            name = self.prefix + output.suffix
            builder = self.journal.builder(index, name, output.dtype) if self.journal else None
            self.builders.append(builder or IndexedDatasetBuilder(name, output.dtype))


def _finish(
    builder: IndexedDatasetBuilder,
    index: int,
    encoder: ChunkEncoder,
    source: Any,
    total: Tally,
    more: Mapping[str, Any],
) -> Manifest:
    output, tokenizer = encoder.outputs[index], encoder.tokenizer
    counts = {
        "key": output.key,
        "tokenizer_type": tokenizer.name,
        "eod": tokenizer.eod,
        "empty_documents": total.empty[index],
        "bad_records": total.faults,
        "text_bytes": total.text_bytes[index],
    }
    fingerprint = tokenizer.fingerprint() if output.framed else tokenizer.fingerprint().without_added()
    return finalize_with_manifest(
        builder,
        tokenizer=fingerprint if output.holds_ids else None,
        source=source,
        extra={**counts, **output.extra, **more},
    )
