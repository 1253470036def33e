"""Token files of other kinds turned into `.bin`/`.idx` pairs of the `mmap` format: GPT-NeoX's `cached` and `lazy`, and
`.npy` files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import DTYPES, IndexedDataset, token_dtype
from megatron.data.tokens.manifest import Manifest, finalize_with_manifest
from megatron.errors import UserError

_PIECE = 1 << 22  # tokens that are copied at a time


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
