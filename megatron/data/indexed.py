"""Token datasets as `.bin`/`.idx` pairs: GPT-NeoX's and Megatron's `mmap` format, read and written byte for byte.

`<prefix>.bin` holds the tokens of all items back to back. `<prefix>.idx`, little endian and without padding:

| offset   | type       | content                                                                     |
|----------|------------|-----------------------------------------------------------------------------|
| 0        | 9 bytes    | magic                                                                       |
| 9        | u64        | version, 1                                                                  |
| 17       | u8         | code of the token type, see `DTYPES`                                        |
| 18       | u64        | N, number of items                                                          |
| 26       | u64        | D, length of the document index                                             |
| 34       | N x int32  | tokens per item                                                             |
| 34 + 4N  | N x int64  | byte offset of each item in `.bin`                                          |
| 34 + 12N | D x int64  | number of the first item of each document; first 0, last N                  |

Training treats each *item* as a document, as NeoX does; the document index is kept for tools.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from megatron.data.prefixes import find_prefix
from megatron.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
MAX_ITEM = 2**31 - 1  # sizes are int32
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes: magic, version, type code, N, D

DTYPES: dict[int, np.dtype] = {
    code: np.dtype(kind)
    for code, kind in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f4", 7: "<f8", 8: "<u2"}.items()
}
CODES: dict[np.dtype, int] = {dtype: code for code, dtype in DTYPES.items()}
# Later Megatron-LM swapped the two float types; the size of `.bin` tells which table a file was written with.
SWAPPED_FLOATS = {6: DTYPES[7], 7: DTYPES[6]}


def token_dtype(vocab_size: int) -> np.dtype:
    """The type in which ids of a vocabulary (added tokens included) are stored: u16 below 65500 entries, else int32.

    The limit is NeoX's, so that both write the same bytes.
    """
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


class IndexedDataset:
    """Read-only view of one `.bin`/`.idx` pair; both files are memory-mapped and nothing is loaded up front.

    Args:
        prefix: path without `.bin`/`.idx`; see `find_prefix` for what else is understood.
        warmup: read the whole token file once, so that a slow file system is met at start and not in the loop
            (`mmap_warmup`).

    Raises `UserError` naming the file when one is missing, foreign, or not of the size its header promises.
    """

    def __init__(self, prefix: str | Path, *, warmup: bool = False) -> None:
        self.prefix = find_prefix(prefix)
        self._open()
        if warmup:
            self.warm_up()

    def _open(self) -> None:
        idx_path, bin_path = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        code, items, docs = _read_header(idx_path)
        expected, found = HEADER.size + 12 * items + 8 * docs, idx_path.stat().st_size
        if found != expected:
            raise UserError(
                f"{idx_path}: the header promises {items} items and a document index of {docs}, "
                f"so {expected} bytes, but the file has {found}. It is incomplete or damaged: write the dataset again."
            )
        buffer = map_file(idx_path)
        at = HEADER.size
        self.sizes: np.ndarray = np.frombuffer(buffer, "<i4", items, at)
        self.pointers: np.ndarray = np.frombuffer(buffer, "<i8", items, at + 4 * items)
        self.doc_idx: np.ndarray = np.frombuffer(buffer, "<i8", docs, at + 12 * items)
        found = bin_path.stat().st_size
        self.dtype = _resolve_dtype(code, self.sizes, found)
        last = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if items else 0
        if found != last:
            raise UserError(
                f"{bin_path}: the index {idx_path.name} describes {last} bytes of tokens, but the file has {found}. "
                "It is incomplete, or the two files do not belong together."
            )
        self._bin = np.frombuffer(map_file(bin_path), np.uint8) if last else np.empty(0, np.uint8)

    def warm_up(self) -> None:
        """Read the whole token file once."""
        chunk = 1 << 26
        for start in range(0, len(self._bin), chunk):
            self._bin[start : start + chunk : mmap.PAGESIZE].sum()

    def __len__(self) -> int:
        """Number of items."""
        return len(self.sizes)

    def __getstate__(self) -> dict:
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict) -> None:
        self.prefix = state["prefix"]
        self._open()

    @property
    def parts(self) -> list[IndexedDataset]:
        """The datasets that this one is joined from: itself, unless a data path is a glob."""
        return [self]

    @property
    def num_documents(self) -> int:
        """Documents according to the document index (the items, when no document was ever ended)."""
        return len(self.doc_idx) - 1 if len(self.doc_idx) > 1 else len(self)

    @property
    def num_tokens(self) -> int:
        """Tokens of all items."""
        return len(self._bin) // self.dtype.itemsize

    @property
    def tokens(self) -> np.ndarray:
        """All tokens back to back, `[num_tokens]`: a read-only view of the file."""
        return self._bin.view(self.dtype)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `[offset, offset + length)` of item `index` (to its end without `length`), `[length]` of `self.dtype`.

        The result is a read-only view of the file. Raises `IndexError` outside the dataset or the item.
        """
        if not 0 <= index < len(self.sizes):
            raise IndexError(f"{self.prefix}: item {index} of {len(self.sizes)}")
        size = int(self.sizes[index])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"{self.prefix}: tokens {offset}:{offset + length} of item {index}, which has {size}")
        # Python integers: numpy's 32-bit scalars would wrap beyond 2 GiB.
        width = self.dtype.itemsize
        start = int(self.pointers[index]) + offset * width
        return self._bin[start : start + length * width].view(self.dtype)

    __getitem__ = get


def _read_header(path: Path) -> tuple[int, int, int]:
    """The type code, N and D of an index file. Raises `UserError` when it is not one of ours."""
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if raw.startswith(LEGACY_MAGIC):
        raise UserError(f"{path}: written in the old 'cached'/'lazy' format. Tokenise the data again (format 'mmap').")
    if len(raw) < HEADER.size:
        raise UserError(f"{path}: an index is at least {HEADER.size} bytes long, but the file has {len(raw)}.")
    magic, version, code, items, docs = HEADER.unpack(raw)
    if magic != MAGIC:
        raise UserError(f"{path}: not a token index: expected it to start with {MAGIC!r}, found {magic!r}.")
    if version != VERSION:
        raise UserError(f"{path}: index version {version}, but only version {VERSION} is known.")
    if code not in DTYPES:
        raise UserError(f"{path}: unknown token type code {code}, expected one of {sorted(DTYPES)}.")
    return code, items, docs


def _resolve_dtype(code: int, sizes: np.ndarray, bin_bytes: int) -> np.dtype:
    """The token type of a code; for the float codes 6 and 7 the one of the two tables that fits the size of `.bin`."""
    if code in SWAPPED_FLOATS and int(sizes.sum(dtype=np.int64)) * SWAPPED_FLOATS[code].itemsize == bin_bytes:
        return SWAPPED_FLOATS[code]
    return DTYPES[code]


def map_file(path: Path) -> mmap.mmap:
    """A file that is not empty, mapped for reading."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class IndexedDatasetBuilder:
    """Writes one `.bin`/`.idx` pair; nothing is visible under the final names before `finalize`.

    Used as a context manager it removes what it wrote when the block fails:

        with IndexedDatasetBuilder(prefix, token_dtype(vocab_size)) as builder:
            builder.add_document(ids)
            builder.finalize()

    Args:
        prefix: path without `.bin`/`.idx`; missing folders are made.
        dtype: type of a stored token, one of `DTYPES`. A value beyond it raises `ValueError` when it is added.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<") if np.dtype(dtype).itemsize > 1 else np.dtype(dtype)
        if self.dtype not in CODES:
            raise ValueError(f"tokens cannot be stored as {self.dtype}: choose one of {[str(d) for d in CODES]}")
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._temp = f"{self.prefix}.{os.getpid()}.tmp"
        self._bin = open(f"{self._temp}.bin", "wb")  # noqa: SIM115  open until finalize or abort
        self._sizes, self._doc_idx = array("i"), array("q", [0])
        self._tokens = 0

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *failure: object) -> None:
        self.abort()  # after finalize there is nothing left to remove

    @property
    def num_items(self) -> int:
        return len(self._sizes)

    @property
    def num_documents(self) -> int:
        return len(self._doc_idx) - 1

    @property
    def num_tokens(self) -> int:
        return self._tokens

    def add_item(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one item: `[n]` token ids."""
        values = np.asarray(tokens) if len(tokens) else np.empty(0, self.dtype)
        self._write(values)
        self._add_size(len(values))

    def end_document(self) -> None:
        """The items since the last call form one document."""
        self._doc_idx.append(len(self._sizes))

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
        first = len(self._sizes)
        if len(lengths) and int(lengths.max()) > MAX_ITEM:
            self._add_size(int(lengths.max()))
        self._sizes.frombytes(lengths.astype(np.int32).tobytes())
        self._doc_idx.frombytes(np.arange(first + 1, first + 1 + len(lengths), dtype=np.int64).tobytes())

    def append(self, prefix: str | Path) -> None:
        """Append another dataset, its documents included. The types must be equal (`UserError`)."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise UserError(f"{other.prefix} stores {other.dtype}, but {self.prefix} is written as {self.dtype}.")
        first, chunk = len(self._sizes), 1 << 26
        for start in range(0, len(other._bin), chunk):
            self._bin.write(other._bin[start : start + chunk])
        self._tokens += other.num_tokens
        self._sizes.frombytes(other.sizes.tobytes())
        self._doc_idx.frombytes((other.doc_idx[1:] + first).tobytes())

    def finalize(self, publish: Callable[[str], None] | None = None) -> None:
        """Write the index and move both files to their final names, replacing an older dataset of that name.

        `publish(index_path)` is called with the finished index while it still has its temporary name (the manifest
        needs its checksum); the index appears last, so that whoever sees it sees everything.
        """
        self._bin.flush()
        os.fsync(self._bin.fileno())
        self._bin.close()
        self._write_index(f"{self._temp}.idx")
        # Without its index the old dataset is plainly incomplete; with it, it would be silently wrong for a moment.
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        if publish is not None:
            publish(f"{self._temp}.idx")
        os.replace(f"{self._temp}.bin", f"{self.prefix}.bin")
        os.replace(f"{self._temp}.idx", f"{self.prefix}.idx")

    def abort(self) -> None:
        """Remove what was written so far."""
        with suppress(OSError):  # on a full disk what is still buffered fails again
            self._bin.close()
        for suffix in (".bin", ".idx"):
            Path(self._temp + suffix).unlink(missing_ok=True)

    def _add_size(self, size: int) -> None:
        if size > MAX_ITEM:
            raise ValueError(f"{self.prefix}: an item of {size} tokens; the format holds at most {MAX_ITEM}")
        self._sizes.append(size)

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
        self._bin.write(np.ascontiguousarray(values, dtype=self.dtype))
        self._tokens += values.size

    def _write_index(self, path: str) -> None:
        sizes = np.frombuffer(self._sizes, np.int32) if self._sizes else np.empty(0, np.int32)
        with open(path, "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(sizes), len(self._doc_idx)))
            file.write(sizes.astype("<i4", copy=False))
            offset, chunk = 0, 1 << 20
            for start in range(0, len(sizes), chunk):
                # int64 throughout: int32 byte offsets wrap beyond 2 GiB.
                lengths = sizes[start : start + chunk].astype("<i8") * self.dtype.itemsize
                ends = np.cumsum(lengths) + offset
                file.write(ends - lengths)
                offset = int(ends[-1])
            file.write(np.frombuffer(self._doc_idx, "<i8"))
            file.flush()
            os.fsync(file.fileno())
