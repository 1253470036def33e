"""Token files of other kinds turned into `.bin`/`.idx` pairs: fairseq's old index (GPT-NeoX's `cached` and `lazy`), and
`.npy` files.

The old `<prefix>.idx`, little endian: `TNTIDX\\0\\0`, then u64: version 1, type code, bytes per token, N items, S
dimensions, D documents; then int64: N+1 first dimensions, N+1 token offsets, S sizes, D first items of documents.
`<prefix>.bin` is the same as today's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import DTYPES, LEGACY_MAGIC, IndexedDataset, token_dtype
from megatron.data.tokens.manifest import Manifest, finalize_with_manifest
from megatron.data.tokens.mapped_file import MappedFile
from megatron.data.tokens.token_files import TokenFiles
from megatron.errors import UserError

_NUMBERS = 6  # u64 after the magic
_PIECE = 1 << 22  # tokens that are copied at a time


class LegacyTokens(IndexedDataset):
    """A dataset with the old index behind the interface of `IndexedDataset`. Raises `UserError` when it is damaged."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self._open()

    def _open(self) -> None:
        index, content = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        words = np.fromfile(index, "<i8", offset=len(LEGACY_MAGIC))
        if len(words) < _NUMBERS:
            raise UserError(f"{index} is truncated. Copy the file again.")
        version, code, width, items, dimensions, documents = words[:_NUMBERS].tolist()
        expected = _NUMBERS + 2 * (items + 1) + dimensions + documents
        if version != 1 or code not in DTYPES or DTYPES[code].itemsize != width or len(words) != expected:
            raise UserError(
                f"{index}: not a whole index of the old kind (version {version}, {8 + 8 * len(words)} bytes)."
            )
        if dimensions != items:
            raise UserError(f"{index}: {dimensions} dimensions for {items} items; only flat lists of tokens are known.")
        at = _NUMBERS + items + 1
        offsets, rest = words[at : at + items + 1], words[at + items + 1 :]
        self.sizes, self.doc_idx = rest[:items].astype(np.int32), rest[items:]
        if not content.is_file() or content.stat().st_size != int(offsets[-1]) * width:
            raise UserError(f"{content} is missing or does not have {int(offsets[-1]) * width} bytes, as {index} says.")
        if not np.array_equal(np.diff(offsets), self.sizes):
            raise UserError(f"{index}: its items are not stored one after the other.")
        self.dtype, self.pointers = DTYPES[code], offsets[:-1] * width
        self._content = MappedFile(content)


def open_any(path: str, files: TokenFiles) -> IndexedDataset:
    """The dataset at a data path, or at the prefix of one with the old index."""
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    index = Path(f"{prefix}.idx")
    if index.is_file():
        with index.open("rb") as file:
            if file.read(len(LEGACY_MAGIC)) == LEGACY_MAGIC:
                return LegacyTokens(prefix)
    return files.open(path)


def convert(
    data: IndexedDataset,
    prefix: str | Path,
    dtype: np.dtype | None = None,
    report: Callable[[int], None] = lambda tokens: None,
) -> Manifest:
    """Write `data` as a `.bin`/`.idx` pair with a manifest; documents stay as they are.

    Args:
        dtype: type of a stored token; by default that of the data, for unsigned 32 bits and more by its largest id.
        report: called with the tokens of every block.
    """
    kept = dtype or (data.dtype if data.dtype in DTYPES.values() and data.dtype.itemsize <= 4 else _fit_dtype(data))
    with IndexedDatasetBuilder(prefix, kept) as builder:
        for part in data.parts:
            ends, tokens = np.cumsum(part.sizes, dtype=np.int64), part.tokens
            first = 0
            while first < len(part):
                start = int(ends[first] - part.sizes[first])
                stop = max(first + 1, int(np.searchsorted(ends, start + _PIECE, side="right")))
                _copy(builder, part, tokens[start : int(ends[stop - 1])], first, stop)
                report(int(ends[stop - 1]) - start)
                first = stop
        return finalize_with_manifest(builder, tokenizer=None, source={"converted": Path(data.prefix).name})


def _copy(builder: IndexedDatasetBuilder, part: IndexedDataset, tokens: np.ndarray, first: int, stop: int) -> None:
    """Items `[first, stop)`, which are `tokens` back to back."""
    lengths = part.sizes[first:stop].astype(np.int64)
    try:
        if part.num_documents == len(part):
            builder.add_documents(tokens, lengths)
            return
        documents = set(part.doc_idx[1:].tolist())
        ends = np.cumsum(lengths).tolist()
        for item, (end, length) in enumerate(zip(ends, lengths.tolist(), strict=True), start=first + 1):
            builder.add_item(tokens[end - length : end])
            if item in documents:
                builder.end_document()
    except ValueError as error:
        raise UserError(f"{part.prefix} cannot be stored as {builder.dtype.name}: {error}") from error


def _fit_dtype(data: IndexedDataset) -> np.dtype:
    largest = 0
    for part in data.parts:
        tokens = part.tokens
        for start in range(0, len(tokens), _PIECE):
            largest = max(largest, int(tokens[start : start + _PIECE].max()))
    return token_dtype(largest + 1)
