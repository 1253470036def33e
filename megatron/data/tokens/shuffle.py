"""Documents in an order of chance that depends on a seed and on what is in them, not on where they lay.

GPT-NeoX's `split` takes the last documents of a file for validation and test; of a shuffled one they are a fair sample.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import Manifest
from megatron.errors import UserError

SHUFFLED = "shuffled"
"""The entry of a manifest's `source` of data whose documents lie in such an order: its seed, or how it was made."""
_BLOCK = 1 << 22  # tokens gathered before they are written
Report = Callable[[int], None]


@dataclass(frozen=True)
class Order:
    """Pieces of documents, in the order in which they are to be written. Each array is `[pieces]`.

    `items`: the number of a piece's document; `offsets`, `lengths`: its tokens there. Without a limit on their length,
    the pieces are the documents.
    """

    items: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray

    def of(self, companion: IndexedDataset) -> Order:
        """The same documents, uncut, of a dataset with other values of each (labels, rewards)."""
        return Order(self.items, np.zeros_like(self.items), companion.sizes[self.items].astype(np.int64))


def shuffled_order(
    parts: Sequence[IndexedDataset], seed: int, *, longest: int | None = None, report: Report = lambda nbytes: None
) -> tuple[Order, list[int]]:
    """The order of the documents of all parts, numbered through, and the CRC-32 of each part's tokens, which are read.

    A piece's place is that of a keyed hash (BLAKE2b) of its tokens, so that equal documents lie together, and the order
    of the documents and parts does not matter. Cost: 32 bytes of memory for each.

    Args:
        seed: another one gives another order.
        longest: a longer document is cut into pieces of equal length of at most so many tokens.
        report: called with bytes read.

    Raises `UserError` when documents consist of several items.
    """
    key, crcs, first = seed.to_bytes(16, "little", signed=True), list[int](), 0
    hashes, items, offsets, lengths = array("Q"), array("q"), array("q"), array("q")
    for data in parts:
        if data.num_documents != len(data):
            raise UserError(f"{data.prefix}: its documents consist of several items, which cannot be shuffled")
        crc = 0
        for item, size in enumerate(data.sizes.tolist()):
            tokens = data.get(item)
            crc = zlib.crc32(tokens, crc)
            count = -(-size // longest) if longest and size else 1
            for piece in range(count):
                begin, end = size * piece // count, size * (piece + 1) // count
                digest = hashlib.blake2b(tokens[begin:end], digest_size=8, key=key).digest()
                hashes.append(int.from_bytes(digest, "little"))
                items.append(first + item)
                offsets.append(begin)
                lengths.append(end - begin)
            report(tokens.nbytes)
        crcs.append(crc)
        first += len(data)
    order = np.argsort(np.frombuffer(hashes, np.uint64), kind="stable")
    return Order(*(np.frombuffer(column, np.int64)[order] for column in (items, offsets, lengths))), crcs


def write_in_order(
    builder: IndexedDatasetBuilder, data: IndexedDataset, order: Order, report: Report = lambda nbytes: None
) -> None:
    """Append the pieces of `data` to `builder`, each as a document; `report` is called with the bytes written."""
    pieces: list[np.ndarray] = []
    waiting = 0
    for item, offset, length in zip(order.items.tolist(), order.offsets.tolist(), order.lengths.tolist()):
        pieces.append(data.get(item, offset, length))
        waiting += length
        if waiting >= _BLOCK:
            _write(builder, pieces, report)
            pieces, waiting = [], 0
    _write(builder, pieces, report)


def _write(builder: IndexedDatasetBuilder, pieces: Sequence[np.ndarray], report: Report) -> None:
    if pieces:
        builder.add_documents(np.concatenate(pieces), [len(piece) for piece in pieces])
        report(sum(piece.nbytes for piece in pieces))


def is_shuffled(manifest: Manifest | None) -> bool:
    """Whether the documents are known to lie in an order of chance."""
    return manifest is not None and isinstance(manifest.source, dict) and SHUFFLED in manifest.source
