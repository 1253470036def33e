"""Writing `.bin`/`.idx` pairs (the format: `indexed`), one process at a time and invisible until all is done."""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.checksums import join_crcs
from megatron.data.tokens.indexed import CODES, HEADER, MAGIC, MAX_ITEM, VERSION, IndexedDataset
from megatron.data.tokens.partial import PARTIAL, WriteError, open_alone
from megatron.errors import UserError


@dataclass(frozen=True)
class Mark:
    """How far a dataset was written: what is beyond is cut off on resume. `crc32`: of the tokens until there."""

    items: int
    tokens: int
    crc32: int = 0


class IndexedDatasetBuilder:
    """Writes one `.bin`/`.idx` pair; nothing is visible under the final names before `finalize`.

    Until then the files are `<prefix>.bin.partial` and `<prefix>.idx.partial`, which one process at a time may hold;
    the files of a killed one are overwritten. Lengths go to the file as well, so memory does not grow with
    the data (only documents of several items are remembered).

    Used as a context manager it removes what it wrote when the block fails:

        with IndexedDatasetBuilder(prefix, token_dtype(vocab_size)) as builder:
            builder.add_document(ids)
            builder.finalize()

    Args:
        prefix: path without `.bin`/`.idx`; missing folders are made.
        dtype: type of a stored token, one of `DTYPES`. A value beyond it raises `ValueError` when it is added.
        resume: continue from a mark of an earlier builder whose files were kept; one item per document only.

    Raises `UserError` when the files cannot be opened or another process holds them, `WriteError` when the disk is
    full.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type, resume: Mark | None = None) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<") if np.dtype(dtype).itemsize > 1 else np.dtype(dtype)
        if self.dtype not in CODES:
            raise ValueError(f"tokens cannot be stored as {self.dtype}: choose one of {[str(d) for d in CODES]}")
        self._bin_path, self._idx_path = f"{self.prefix}.bin{PARTIAL}", f"{self.prefix}.idx{PARTIAL}"
        mark = resume or Mark(0, 0)
        self._items, self._tokens, self._crc32 = mark.items, mark.tokens, mark.crc32
        self._documents, self._finished = mark.items, False
        self._doc_idx: array | None = None  # as long as every document is one item
        self._bin = open_alone(self._bin_path, None if resume is None else mark.tokens * self.dtype.itemsize)
        try:
            self._idx = open_alone(self._idx_path, None if resume is None else HEADER.size + 4 * mark.items)
        except BaseException:
            self._bin.close()
            raise
        if resume is None:
            self._idx.write(bytes(HEADER.size))  # filled in at the end

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *failure: object) -> None:
        self.abort()  # after finalize there is nothing left to remove

    @property
    def num_items(self) -> int:
        return self._items

    @property
    def num_documents(self) -> int:
        return self._documents

    @property
    def num_tokens(self) -> int:
        return self._tokens

    @property
    def crc32(self) -> int:
        """CRC-32 of `.bin`, of what was given to be written."""
        return self._crc32

    @property
    def tokens_path(self) -> str:
        """Where the tokens are until `finalize`."""
        return self._bin_path

    @property
    def index_path(self) -> str:
        """Where the index is until `publish`."""
        return self._idx_path

    def add_item(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one item: `[n]` token ids."""
        values = np.asarray(tokens) if len(tokens) else np.empty(0, self.dtype)
        self._write(values)
        self._add_sizes(np.array([len(values)]))

    def end_document(self) -> None:
        """The items since the last call form one document."""
        if self._doc_idx is None and self._items != self._documents + 1:
            self._remember_documents()
        self._documents += 1
        if self._doc_idx is not None:
            self._doc_idx.append(self._items)

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append a document of one item."""
        self.add_item(tokens)
        self.end_document()

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray | Sequence[int]) -> None:
        """Append many documents of one item each: `tokens` is all of them back to back, `lengths` how many each has."""
        lengths = np.asarray(lengths, dtype=np.int64)
        if int(lengths.sum()) != len(tokens):
            raise ValueError(
                f"{self.prefix}: lengths add up to {int(lengths.sum())}, but {len(tokens)} tokens are given"
            )
        self._write(np.asarray(tokens))
        self._add_sizes(lengths)
        self._end_documents(np.arange(self._items - len(lengths) + 1, self._items + 1))

    def append(self, prefix: str | Path, report: Callable[[int], None] = lambda nbytes: None) -> int:
        """Append another dataset, its documents included. Returns the CRC-32 of its tokens, as they were read.

        `report` is called with the bytes of every block of tokens. A dataset without ended documents counts as one
        document per item, as everywhere. Raises `UserError` when the types differ.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise UserError(f"{other.prefix} stores {other.dtype}, but {self.prefix} is written as {self.dtype}.")
        first, crc = self._items, 0
        with ThreadPoolExecutor(1) as thread:
            for piece in _pieces(other._bin, 1 << 24):
                counted = thread.submit(zlib.crc32, piece, crc)
                with self._name_write_errors():
                    self._bin.write(piece)
                crc = counted.result()
                report(len(piece))
        self._crc32 = join_crcs(self._crc32, crc, other.num_tokens * self.dtype.itemsize)
        self._tokens += other.num_tokens
        for piece in _pieces(other.sizes, 1 << 20):
            self._add_sizes(piece)
        ends = other.doc_idx[1:] if len(other.doc_idx) > 1 else np.arange(1, len(other) + 1)
        for piece in _pieces(ends, 1 << 20):
            self._end_documents(piece + first)
        return crc

    def mark(self) -> Mark:
        """Flush to disk and return how far that is. Only for documents of one item."""
        if self._doc_idx is not None or self._documents != self._items:
            raise ValueError(f"{self.prefix}: documents of several items cannot be resumed")
        with self._name_write_errors():
            for file in (self._bin, self._idx):
                file.flush()
                os.fsync(file.fileno())
        return Mark(self._items, self._tokens, self._crc32)

    def finish(self) -> None:
        """Complete both files under their unfinished names; `finalize` calls it if needed."""
        if self._finished:
            return
        with self._name_write_errors():
            self._write_index()
            for file in (self._bin, self._idx):
                file.flush()
                os.fsync(file.fileno())
        self._finished = True

    def finalize(self, publish: Callable[[str], None] | None = None) -> None:
        """Write the index and move both files to their final names, replacing an older dataset of that name.

        `publish(index_path)` is called with the finished index while it still has its temporary name (the manifest
        needs its checksum); the index appears last, so a dataset with an index is complete.
        """
        self.finish()
        with self._name_write_errors():
            # The old dataset without its index is incomplete; with it, it would be wrong for a moment.
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)
            if publish is not None:
                publish(self._idx_path)
            os.replace(self._bin_path, f"{self.prefix}.bin")
            os.replace(self._idx_path, f"{self.prefix}.idx")
            self.close()

    def close(self) -> None:
        """Close the files and keep them, for a later builder that resumes."""
        for file in (self._bin, self._idx):
            with suppress(OSError):  # on a full disk what is still buffered fails again
                file.close()

    def abort(self) -> None:
        """Remove what was written so far; nothing to do after `finalize` or `close`."""
        if self._bin.closed:
            return
        for path in (self._bin_path, self._idx_path):  # before closing, when another process may take them
            Path(path).unlink(missing_ok=True)
        self.close()

    @contextmanager
    def _name_write_errors(self) -> Iterator[None]:
        try:
            yield
        except WriteError:
            raise
        except OSError as error:  # a full disk is not a bug
            raise WriteError(f"cannot write {self.prefix}: {error.strerror or error}.") from error

    def _write(self, values: np.ndarray) -> None:
        if values.ndim != 1:
            raise ValueError(f"{self.prefix}: an item is a flat list of ids, got shape {values.shape}")
        if self.dtype.kind in "iu" and values.size and values.dtype != self.dtype:
            if values.dtype.kind not in "iu":
                raise ValueError(f"{self.prefix}: ids must be integers, got {values.dtype}")
            low, high, limits = int(values.min()), int(values.max()), np.iinfo(self.dtype)
            if low < limits.min or high > limits.max:
                wrong = high if high > limits.max else low
                raise ValueError(f"{self.prefix}: id {wrong} does not fit {self.dtype} ({limits.min}..{limits.max})")
        stored = np.ascontiguousarray(values, dtype=self.dtype)
        with self._name_write_errors():
            self._bin.write(stored)
        self._crc32 = zlib.crc32(stored, self._crc32)
        self._tokens += values.size

    def _add_sizes(self, sizes: np.ndarray) -> None:
        if len(sizes) and int(sizes.max()) > MAX_ITEM:
            raise ValueError(f"{self.prefix}: an item of {sizes.max()} tokens; the format holds at most {MAX_ITEM}")
        with self._name_write_errors():
            self._idx.write(np.ascontiguousarray(sizes, dtype="<i4"))
        self._items += len(sizes)

    def _end_documents(self, ends: np.ndarray) -> None:
        """Documents that end at these numbers of items."""
        expected = np.arange(self._documents + 1, self._documents + 1 + len(ends))
        if self._doc_idx is None and not np.array_equal(ends, expected):
            self._remember_documents()
        self._documents += len(ends)
        if self._doc_idx is not None:
            self._doc_idx.frombytes(ends.astype(np.int64).tobytes())

    def _remember_documents(self) -> None:
        self._doc_idx = array("q", range(self._documents + 1))

    def _write_index(self) -> None:
        """What follows the lengths, and the header before them."""
        self._idx.flush()
        offset, chunk = 0, 1 << 16
        with open(self._idx_path, "rb") as lengths:
            lengths.seek(HEADER.size)
            for start in range(0, self._items, chunk):
                # int64 throughout: int32 byte offsets wrap beyond 2 GiB.
                raw = lengths.read(4 * min(chunk, self._items - start))
                ends = np.cumsum(np.frombuffer(raw, "<i4").astype("<i8") * self.dtype.itemsize) + offset
                self._idx.write(np.concatenate([[offset], ends[:-1]]).astype("<i8", copy=False))
                offset = int(ends[-1])
        if self._doc_idx is not None:
            self._idx.write(np.frombuffer(self._doc_idx, "<i8"))
        else:
            for start in range(0, self._documents + 1, chunk):
                self._idx.write(np.arange(start, min(start + chunk, self._documents + 1), dtype="<i8"))
        self._idx.seek(0)
        self._idx.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self._items, self._documents + 1))


def _pieces(values: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (values[start : start + size] for start in range(0, len(values), size))
