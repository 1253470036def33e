"""From chunks of a corpus to token datasets: encoded, by worker processes if asked, and written in order.

What is made of a chunk is an encoder's affair (`ChunkEncoder`: texts in `encode_text`, chats in `chat`). The bytes
written depend on the input and the encoder only, never on the number of workers: chunks are cut before they are handed
out and their results are taken back in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megatron.data.tokenise.chunks import Chunk, Fault
from megatron.data.tokenise.resume import Journal
from megatron.data.tokenise.worker_pool import ordered_map
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.manifest import Manifest, finalize_with_manifest
from megatron.data.tokens.partial import PARTIAL, WriteError
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.tokenizer import Tokenizer

SHOWN_FAULTS = 5  # how many of the records left out are named; the rest is counted

logger = get_logger(__name__)


@dataclass(frozen=True)
class Output:
    """A dataset that an encoder makes.

    `suffix`: what follows the prefix in its name (`_text_document`); `dtype`: of the values stored; `key`: the key of
    the records it was made of; `extra`: what its manifest says beside the counts; `holds_ids`: whether the values are
    ids of the tokenizer (or labels among them), False for rewards and the like.
    """

    suffix: str
    dtype: np.dtype
    key: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    holds_ids: bool = True


@dataclass
class Tally:
    """Counts of a piece of the corpus; `documents`, `tokens`, `empty` and `text_bytes` are per output."""

    documents: list[int]
    tokens: list[int]
    empty: list[int]
    text_bytes: list[int]
    faults: int = 0
    first_faults: list[Fault] = field(default_factory=list)
    nbytes: int = 0

    @classmethod
    def zero(cls, outputs: int, nbytes: int = 0) -> Tally:
        """Nothing counted yet, of a piece that stands for `nbytes` of the input."""
        return cls([0] * outputs, [0] * outputs, [0] * outputs, [0] * outputs, nbytes=nbytes)

    @classmethod
    def restored(cls, raw: Mapping[str, Any]) -> Tally:
        """From what `dataclasses.asdict` made of one."""
        return cls(**{**raw, "first_faults": [Fault(**fault) for fault in raw["first_faults"]]})

    def add(self, other: Tally) -> None:
        """Count another piece in."""
        for name in ("documents", "tokens", "empty", "text_bytes"):
            setattr(self, name, [a + b for a, b in zip(getattr(self, name), getattr(other, name))])
        self.faults += other.faults
        self.first_faults = (self.first_faults + other.first_faults)[:SHOWN_FAULTS]
        self.nbytes += other.nbytes

    def refuse(self, fault: Fault, skip: bool) -> None:
        """Count a record that cannot be used; unless such are skipped, raise the `UserError` that says where it is."""
        if not skip:
            raise UserError(f"{fault.where}: {fault.reason}. (--skip-bad-lines leaves such records out)")
        self.faults += 1
        if len(self.first_faults) < SHOWN_FAULTS:
            self.first_faults.append(fault)


@dataclass(frozen=True)
class Encoded:
    """An encoded chunk: per output the values of its documents back to back and the length of each."""

    ids: list[np.ndarray]
    lengths: list[np.ndarray]
    tally: Tally


class ChunkEncoder(Protocol):
    """What turns chunks into values. It is made once and sent to every worker, so it has to pickle.

    `outputs` says what `encode` gives, in that order; `tokenizer` is the one the manifests name.
    """

    @property
    def outputs(self) -> tuple[Output, ...]: ...
    @property
    def tokenizer(self) -> Tokenizer: ...

    def encode(self, chunk: Chunk) -> Encoded:
        """The values of a chunk. Raises `UserError` for a record that cannot be used (see `Tally.refuse`)."""


def encode_stream(chunks: Iterable[Chunk], encoder: ChunkEncoder, workers: int) -> Iterator[Encoded]:
    """The encoded chunks, in order. With `workers` > 1 that many processes share them.

    Raises what encoding raises (of the first chunk that fails), and `DeepyError` soon after a worker is lost.
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

    All files appear under their names at the end. On any failure what was written is removed, unless `journal` (whose
    `watch` the chunks then come from) has noted how to continue it. `report` is called with the running totals after
    every chunk. Raises `UserError` when an output has no document at all, which is allowed only when the datasets are a
    `shard` of larger ones (then: what their manifests say of that).
    """
    with _Files(encoder, prefix, journal) as files:
        total = files.earlier
        for encoded in encode_stream(chunks, encoder, workers):
            total.add(encoded.tally)
            files.add(encoded, total)
            report(total)
        _name_faults(total)
        if shard is None:
            files.require_documents(total)
        manifests = files.publish(total, source, {} if shard is None else {"shard": dict(shard)})
    return manifests, total


class _Files:
    """The datasets being written: all of them appear, or none, and then what is left can be continued or is removed."""

    def __init__(self, encoder: ChunkEncoder, prefix: str, journal: Journal | None) -> None:
        self.encoder, self.prefix, self.journal = encoder, prefix, journal
        self.builders: list[IndexedDatasetBuilder] = []
        self.earlier = Tally.zero(len(encoder.outputs))
        if journal and journal.saved:
            self.earlier = Tally.restored(journal.saved.counts)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        keep = bool(error and self.journal and self.journal.saved)
        self._let_go(keep)
        if isinstance(error, WriteError):
            kept = "Make room and run the same command again: it goes on from what is done." if keep else ""
            raise WriteError(f"{error} {kept or 'Nothing was written.'}") from error
        if keep:
            logger.warning(f"what is done is kept in {self.prefix}*{PARTIAL}: the same command goes on from there")

    def add(self, encoded: Encoded, total: Tally) -> None:
        """Append an encoded chunk; `total` has it counted in."""
        # Not earlier: an empty corpus leaves no folder behind, and forked workers would hold the files as well.
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
                        self._open()  # what the earlier run left, to remove it
                    self.journal.remove()
                bad = f", {total.faults} unusable records" if total.faults else ""
                raise UserError(
                    f"no document to write for key {output.key!r}: {empty} empty ones{bad}. Nothing was written."
                )

    def publish(self, total: Tally, source: Any, extra: Mapping[str, Any]) -> list[Manifest]:
        """Finish the files, those that are still to be made included, and give them their names."""
        if not self.builders:
            self._open()
        for builder in self.builders:
            builder.finish()  # a disk that is full by now shows before any file has its name
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

    def _let_go(self, keep: bool) -> None:
        for builder in self.builders:
            builder.close() if keep else builder.abort()


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
    fingerprint = tokenizer.fingerprint() if output.holds_ids else None
    return finalize_with_manifest(
        builder, tokenizer=fingerprint, source=source, extra={**counts, **output.extra, **more}
    )


def _name_faults(total: Tally) -> None:
    for fault in total.first_faults:
        logger.warning(f"left out {fault.where}: {fault.reason}")
    if total.faults > len(total.first_faults):
        logger.warning(f"... and {total.faults - len(total.first_faults)} more")
