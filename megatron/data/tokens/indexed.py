"""Token datasets as `.bin`/`.idx` pairs: the `mmap` format of GPT-NeoX and Megatron (`builder` writes it).

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

GPT-NeoX's older format (`cached` and `lazy`, fairseq's) is read, too. Its `.bin` is the same, its `.idx` consists of
8-byte numbers after the magic, and is read into memory:

| numbers | type  | content                                                                       |
|---------|-------|-------------------------------------------------------------------------------|
| 6       | u64   | version 1, type code, bytes per token, N items, S dimensions, D as above      |
| N+1     | int64 | number of the first dimension of each item, last S; here each item has one    |
| N+1     | int64 | offset of each item in `.bin` in tokens, last that of the end                 |
| S       | int64 | sizes: tokens per item                                                        |
| D       | int64 | number of the first item of each document                                     |

Training treats each *item* as a document, as NeoX does; the document index is kept for tools.
"""

from __future__ import annotations

import mmap
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.checksums import sample_crc32
from megatron.data.tokens.mapped_file import MappedFile, map_file
from megatron.data.tokens.prefixes import find_prefix
from megatron.errors import UserError
from megatron.files import refuse_lfs_pointer

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
MAX_ITEM = 2**31 - 1  # sizes are int32
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes: magic, version, type code, N, D
_OLD_NUMBERS = 6  # in the header of the old format

FileIdentity = tuple[str, int, int]
"""A file: path, size in bytes, CRC-32 of a sample of its bytes (`checksums.sample_crc32`)."""
_CHECKED = 1 << 15  # items of an index that are checked together: they fit into a cache
_OF_FILES = ("sizes", "pointers", "doc_idx", "dtype", "_content", "_first")  # what `_open` finds
_AGAIN = "the index is damaged: copy it again from its source, or write the dataset again"

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

    Raises `UserError` naming the file when one is missing, of another format, not of the size in its header, or when
    the index contradicts itself. The whole index is read for that (`check_index`).

    One that another process has pickled opens its files when something of them is first asked for.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = find_prefix(prefix)
        for suffix in (".idx", ".bin"):
            refuse_lfs_pointer(Path(f"{self.prefix}{suffix}"))
        self._open()
        check_index(self)

    def _open(self) -> None:
        idx_path, bin_path = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        code, self.sizes, self.pointers, self.doc_idx = _read_index(idx_path)
        items = len(self.sizes)
        found = bin_path.stat().st_size
        self.dtype = _resolve_dtype(code, self.sizes, found)
        last = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if items else 0
        if found != last:
            raise UserError(
                f"{bin_path}: the index {idx_path.name} describes {last} bytes of tokens, but the file has {found}. "
                "It is incomplete, or the two files do not belong together."
            )
        self._content = MappedFile(bin_path, size=last)

    @property
    def _bin(self) -> np.ndarray:
        """The bytes of the tokens, to be read from start to end."""
        return self._content.whole()

    def warm_up(self) -> None:
        """Read the whole token file once, so that a slow file system shows at start and not in the loop."""
        content, chunk = self._bin, 1 << 26
        for start in range(0, len(content), chunk):
            content[start : start + chunk : mmap.PAGESIZE].sum()

    def __len__(self) -> int:
        """Number of items."""
        return len(self.sizes)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name not in _OF_FILES}

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_FILES or "prefix" not in vars(self):
            raise AttributeError(name)
        self._open()
        return vars(self)[name]

    @property
    def parts(self) -> list[IndexedDataset]:
        """The datasets that this one joins: itself, unless a data path is a glob."""
        return [self]

    @property
    def sides(self) -> tuple[IndexedDataset, ...]:
        """The texts of an item, each a dataset of its own: itself, unless the items are pairs."""
        return (self,)

    @cached_property
    def identity(self) -> tuple[FileIdentity, ...]:
        """What tells each file of tokens from another; read once."""
        with ThreadPoolExecutor(min(8, len(self.parts))) as threads:
            return tuple(threads.map(lambda part: identify(part._content.path), self.parts))

    @property
    def num_documents(self) -> int:
        """Documents according to the document index (the items, when no document was ever ended)."""
        return len(self.doc_idx) - 1 if len(self.doc_idx) > 1 else len(self)

    @property
    def num_tokens(self) -> int:
        """Tokens of all items."""
        return self._content.size // self.dtype.itemsize

    @property
    def tokens(self) -> np.ndarray:
        """All tokens back to back, `[num_tokens]`: a read-only view of the file, to be read from start to end."""
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
        return self._content.read(start, length * width).view(self.dtype)

    __getitem__ = get


def identify(path: Path) -> FileIdentity:
    """Path, size in bytes, and CRC-32 of a sample of a file."""
    return str(path), path.stat().st_size, sample_crc32(path)


def check_index(data: IndexedDataset) -> None:
    """Raise `UserError` unless sizes are not negative, items follow one another in `.bin`, and documents up to the end.

    In blocks, so memory does not grow with the data.
    """
    name, width, end = f"{data.prefix}.idx", data.dtype.itemsize, 0
    for first in range(0, len(data), _CHECKED):
        lengths = data.sizes[first : first + _CHECKED].astype(np.int64) * width
        if int(lengths.min()) < 0:
            at = int(np.argmin(lengths))
            raise UserError(f"{name}: item {first + at} has {int(data.sizes[first + at])} tokens; {_AGAIN}.")
        starts = np.cumsum(lengths) - lengths + end
        stored = data.pointers[first : first + _CHECKED]
        if not np.array_equal(starts, stored):
            k = int(np.argmax(starts != stored))
            raise UserError(
                f"{name}: item {first + k} begins at byte {int(stored[k])}, but the items before it end at "
                f"{int(starts[k])}; {_AGAIN}."
            )
        end = int(starts[-1] + lengths[-1])
    borders = data.doc_idx
    if not len(borders) or int(borders[0]) != 0:
        raise UserError(f"{name}: the document index does not begin with item 0; {_AGAIN}.")
    if len(borders) > 1 and int(borders[-1]) != len(data):
        raise UserError(f"{name}: the document index ends at item {int(borders[-1])} of {len(data)}; {_AGAIN}.")
    for first in range(0, len(borders) - 1, _CHECKED):
        block = borders[first : first + _CHECKED + 1]
        if (block[1:] < block[:-1]).any():
            raise UserError(f"{name}: the document index goes back after document {first}; {_AGAIN}.")


Index = tuple[int, np.ndarray, np.ndarray, np.ndarray]
"""An index file: type code, tokens per item, byte offset of each item, first item of each document and N."""


def _read_index(path: Path) -> Index:
    """What an index file of either format holds. Raises `UserError` when it has another one, or another size."""
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if raw.startswith(OLD_MAGIC):
        return _read_old_index(path)
    if len(raw) < HEADER.size:
        raise UserError(f"{path}: an index is at least {HEADER.size} bytes long, but the file has {len(raw)}.")
    magic, version, code, items, docs = HEADER.unpack(raw)
    if magic != MAGIC:
        raise UserError(f"{path}: not a token index: expected it to start with {MAGIC!r}, found {magic!r}.")
    _check_kind(path, version, code)
    expected, found = HEADER.size + 12 * items + 8 * docs, path.stat().st_size
    if found != expected:
        raise _wrong_size(path, items, docs, expected, found)
    buffer, at = map_file(path), HEADER.size
    sizes = np.frombuffer(buffer, "<i4", items, at)
    pointers = np.frombuffer(buffer, "<i8", items, at + 4 * items)
    return code, sizes, pointers, np.frombuffer(buffer, "<i8", docs, at + 12 * items)


def _read_old_index(path: Path) -> Index:
    words = np.fromfile(path, "<i8", offset=len(OLD_MAGIC))
    if len(words) < _OLD_NUMBERS:
        raise UserError(f"{path}: an index of the old format has {_OLD_NUMBERS} numbers and more, found {len(words)}.")
    version, code, width, items, dimensions, docs = words[:_OLD_NUMBERS].tolist()
    _check_kind(path, version, code)
    expected = len(OLD_MAGIC) + 8 * (_OLD_NUMBERS + 2 * (items + 1) + dimensions + docs)
    if min(items, dimensions, docs) < 0 or path.stat().st_size != expected:
        raise _wrong_size(path, items, docs, expected, path.stat().st_size)
    if width != DTYPES[code].itemsize:
        raise UserError(f"{path}: {width} bytes per token, but those of type code {code} have {DTYPES[code].itemsize}.")
    if dimensions != items:
        raise UserError(f"{path}: {dimensions} dimensions for {items} items; only flat lists of tokens are known.")
    starts, sizes = words[_OLD_NUMBERS + items + 1 :][: items + 1], words[_OLD_NUMBERS + 2 * (items + 1) :][:items]
    if items and not 0 <= int(sizes.min()) <= int(sizes.max()) <= MAX_ITEM:
        at = int(np.argmax((sizes < 0) | (sizes > MAX_ITEM)))
        raise UserError(f"{path}: item {at} has {int(sizes[at])} tokens; {_AGAIN}.")
    return code, sizes.astype(np.int32), starts[:-1] * width, words[len(words) - docs :]


def _check_kind(path: Path, version: int, code: int) -> None:
    if version != VERSION:
        raise UserError(f"{path}: index version {version}, but only version {VERSION} is known.")
    if code not in DTYPES:
        raise UserError(f"{path}: unknown token type code {code}, expected one of {sorted(DTYPES)}.")


def _wrong_size(path: Path, items: int, docs: int, expected: int, found: int) -> UserError:
    return UserError(
        f"{path}: the header gives {items} items and a document index of {docs}, so {expected} bytes, but the file has "
        f"{found}. It is incomplete or damaged: write the dataset again."
    )


def _resolve_dtype(code: int, sizes: np.ndarray, bin_bytes: int) -> np.dtype:
    """The token type of a code; for the float codes 6 and 7 the one of the two tables that fits the size of `.bin`."""
    if code in SWAPPED_FLOATS and int(sizes.sum(dtype=np.int64)) * SWAPPED_FLOATS[code].itemsize == bin_bytes:
        return SWAPPED_FLOATS[code]
    return DTYPES[code]
