"""From text to token datasets: a stream of chunks is tokenised, by worker processes if asked, and written in order.

The bytes written depend on the input, the tokenizer and `EncodeOptions` only, never on the number of workers: chunks
are cut before they are handed out and their results are taken back in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.data.chunks import Chunk, Fault
from megatron.data.indexed import IndexedDatasetBuilder, token_dtype
from megatron.data.manifest import Manifest, finalize_with_manifest
from megatron.data.worker_pool import ordered_map
from megatron.errors import DeepyError, UserError
from megatron.log import get_logger
from megatron.tokenizer import Tokenizer

SHOWN_FAULTS = 5  # how many of the records left out are named; the rest is counted

logger = get_logger(__name__)


@dataclass(frozen=True)
class EncodeOptions:
    """What of a record is tokenised and how.

    `keys`: each makes a dataset of its own. `append_eod`: end every document with the tokenizer's eod. `ftfy`: mend
    broken Unicode first. `skip_bad`: leave out records that cannot be used and count them, instead of stopping.
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    ftfy: bool = False
    skip_bad: bool = False


@dataclass
class Tally:
    """Counts of a piece of the corpus; `tokens`, `documents`, `empty` and `text_bytes` are per key."""

    documents: list[int]
    tokens: list[int]
    empty: list[int]
    text_bytes: list[int]
    faults: int = 0
    first_faults: list[Fault] = field(default_factory=list)
    nbytes: int = 0

    @classmethod
    def zero(cls, keys: int) -> Tally:
        """Nothing counted yet."""
        return cls([0] * keys, [0] * keys, [0] * keys, [0] * keys)

    def add(self, other: Tally) -> None:
        """Count another piece in."""
        for name in ("documents", "tokens", "empty", "text_bytes"):
            setattr(self, name, [a + b for a, b in zip(getattr(self, name), getattr(other, name))])
        self.faults += other.faults
        self.first_faults = (self.first_faults + other.first_faults)[:SHOWN_FAULTS]
        self.nbytes += other.nbytes


@dataclass(frozen=True)
class Encoded:
    """A tokenised chunk: per key the ids of its documents back to back and the length of each."""

    ids: list[np.ndarray]
    lengths: list[np.ndarray]
    tally: Tally


class Encoder:
    """Tokenises chunks. Made once and sent to every worker."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        """Raises `UserError` when eod is wanted and the tokenizer has none, or ftfy is wanted and not installed."""
        self.tokenizer, self.options = tokenizer, options
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.eod = tokenizer.require_eod("--append-eod") if options.append_eod else None
        # A tokenizer whose own template ends a text with eod must not get a second one.
        if self.eod is not None and tokenizer.tokenize("a")[-1:] == [self.eod]:
            self.eod = None
        self._fix: Callable[[str], str] | None = _ftfy() if options.ftfy else None

    def encode(self, chunk: Chunk) -> Encoded:
        """Tokenise the documents of a chunk; blank ones are counted and left out."""
        keys = self.options.keys
        tally = Tally.zero(len(keys))
        tally.nbytes = chunk.nbytes
        texts: list[list[str]] = [[] for _ in keys]
        for document in chunk.documents(keys):
            if isinstance(document, Fault):
                self._refuse(document, tally)
                continue
            for column, key in enumerate(keys):
                text = document.texts[key]
                text = self._fix(text) if self._fix else text
                if not text or text.isspace():
                    tally.empty[column] += 1
                else:
                    texts[column].append(text)
        ids, lengths = zip(*(self._column(column, tally, index) for index, column in enumerate(texts)))
        return Encoded(list(ids), list(lengths), tally)

    def _column(self, texts: list[str], tally: Tally, index: int) -> tuple[np.ndarray, np.ndarray]:
        tail = [] if self.eod is None else [self.eod]
        rows = []
        for text, row in zip(texts, self.tokenizer.tokenize_batch(texts)):
            if row:
                rows.append(np.array(row + tail, dtype=self.dtype))
                tally.text_bytes[index] += len(text.encode("utf-8"))
            else:
                tally.empty[index] += 1  # nothing left after the tokenizer's normalisation
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        tally.documents[index], tally.tokens[index] = len(rows), int(lengths.sum())
        return np.concatenate(rows) if rows else np.empty(0, self.dtype), lengths

    def _refuse(self, fault: Fault, tally: Tally) -> None:
        if not self.options.skip_bad:
            raise UserError(f"{fault.where}: {fault.reason}. (--skip-bad-lines leaves such records out)")
        tally.faults += 1
        if len(tally.first_faults) < SHOWN_FAULTS:
            tally.first_faults.append(fault)


def encode_stream(chunks: Iterable[Chunk], encoder: Encoder, workers: int) -> Iterator[Encoded]:
    """The tokenised chunks, in order. With `workers` > 1 that many processes share them.

    Raises what encoding raises (of the first chunk that fails), and `DeepyError` soon after a worker is lost.
    """
    if workers <= 1:
        return map(encoder.encode, chunks)
    return ordered_map(_InWorker(encoder), chunks, workers)


class _InWorker:
    """`Encoder.encode`, for a process that is one of many."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def __call__(self, chunk: Chunk) -> Encoded:
        # The library starts a thread per core in every worker otherwise; it reads this name from the C environment.
        os.putenv("TOKENIZERS_PARALLELISM", "false")
        return self.encoder.encode(chunk)


def write_datasets(
    chunks: Iterable[Chunk],
    encoder: Encoder,
    prefixes: Sequence[str],
    *,
    workers: int = 1,
    source: Any = None,
    report: Callable[[Tally], None] = lambda tally: None,
) -> tuple[list[Manifest], Tally]:
    """Tokenise `chunks` into one `.bin`/`.idx`/manifest per key (`prefixes`, in the order of the keys).

    All files appear under their names at the end; on any failure what was written is removed. `report` is called with
    the running totals after every chunk. Raises `UserError` when a key has no document at all.
    """
    options, total = encoder.options, Tally.zero(len(prefixes))
    builders: list[IndexedDatasetBuilder] = []
    with ExitStack() as stack:
        for encoded in encode_stream(chunks, encoder, workers):
            total.add(encoded.tally)
            if not builders and any(encoded.tally.documents):  # not earlier: an empty corpus leaves no folder behind
                builders = [stack.enter_context(IndexedDatasetBuilder(p, encoder.dtype)) for p in prefixes]
            for builder, ids, lengths in zip(builders, encoded.ids, encoded.lengths):
                _append(builder, ids, lengths)
            report(total)
        _name_faults(total)
        for key, documents, empty in zip(options.keys, total.documents, total.empty):
            if not documents:
                bad = f", {total.faults} unusable records" if total.faults else ""
                raise UserError(f"no document to write for key {key!r}: {empty} empty ones{bad}. Nothing was written.")
        manifests = [
            finalize_with_manifest(
                builder,
                tokenizer=encoder.tokenizer.fingerprint(),
                source=source,
                extra={
                    "key": key,
                    "tokenizer_type": encoder.tokenizer.name,
                    "eod": encoder.tokenizer.eod,
                    "append_eod": options.append_eod,
                    "ftfy": options.ftfy,
                    "empty_documents": total.empty[index],
                    "bad_records": total.faults,
                    "text_bytes": total.text_bytes[index],
                },
            )
            for index, (key, builder) in enumerate(zip(options.keys, builders))
        ]
    return manifests, total


def _append(builder: IndexedDatasetBuilder, ids: np.ndarray, lengths: np.ndarray) -> None:
    try:
        builder.add_documents(ids, lengths)
    except OSError as error:  # a full disk is nobody's bug
        raise DeepyError(f"cannot write {builder.prefix}: {error.strerror}. Nothing was written.") from error


def _name_faults(total: Tally) -> None:
    for fault in total.first_faults:
        logger.warning(f"left out {fault.where}: {fault.reason}")
    if total.faults > len(total.first_faults):
        logger.warning(f"... and {total.faults - len(total.first_faults)} more")


def _ftfy() -> Callable[[str], str]:
    try:
        from ftfy import fix_text
    except ImportError as error:
        raise UserError("--ftfy needs ftfy: pip install -r requirements/requirements.txt") from error
    return fix_text
