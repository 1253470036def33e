"""Token ids in `.npy` files, as OLMo-core and the Dolma toolkit write them.

Most of these are raw little-endian ids without any header, despite their name; real `.npy` files with a header are
read as well. One file holds many documents, each ended by the end-of-document id. Where documents begin and end is
taken from Dolma's `<name>.csv.gz` next to the file (start and end per line) if it exists, and else found by reading
the file once; either result is stored in the index cache.

OLMo-core's label masks, one boolean per token, become labels.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megatron.data.sample import IGNORE
from megatron.data.tokens.cache import Arrays, IndexCache, content_key
from megatron.data.tokens.indexed import MAX_ITEM, IndexedDataset
from megatron.data.tokens.mapped_file import MappedFile
from megatron.errors import UserError
from megatron.log import get_logger, progress

LOGGER = get_logger(__name__)

MAGIC = b"\x93NUMPY"
BORDERS_VERSION = 1
_CHUNK = 1 << 24  # tokens that are searched at a time
_PROBE = 1 << 16  # bytes at the start, middle and end that show the type, and distinguish files
_HIGHEST_HALF = 16  # ids of every vocabulary are below 2^20, so the upper halves of 32-bit ids are below this


class NpyTokens(IndexedDataset):
    """One `.npy` file of token ids behind the interface of `IndexedDataset`; every document is an item.

    Args:
        path: the file.
        eod: the id that ends a document; not needed with a `.csv.gz`. What follows the last one is a document too.
        dtype: type of the ids in a file without header; detected by default.
        cache: keeps the document borders.

    Raises `UserError` for a file that is empty, truncated or of another kind, and when the type or the document borders
    cannot be found.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        eod: int | None = None,
        dtype: str | None = None,
        cache: IndexCache | None = None,
    ) -> None:
        self.prefix = str(path)
        self._eod, self._given, self._cache = eod, dtype, cache or IndexCache(None)
        self._open()

    def _open(self) -> None:
        path = Path(self.prefix)
        self._content, self.dtype = read_npy(path, self._given)
        if self.dtype.kind not in "iu":
            raise UserError(f"{path} holds {self.dtype} values, not token ids.")
        borders = path.with_suffix(".csv.gz")
        known = borders if borders.is_file() else None
        if known is None and self._eod is None:
            raise UserError(f"{path}: which id ends a document? Set npy_eod (or put {borders.name} next to it).")
        key = content_key(
            {
                "kind": "npy documents",
                "version": BORDERS_VERSION,
                "file": _identity(path),
                "dtype": self.dtype.str,
                "borders": _identity(known) if known is not None else self._eod,
            },
            *_probes(self._content),
        )

        def build() -> Arrays:
            if known is not None:
                return _arrays(read_ends(known, path, self.num_tokens), path, self.dtype)
            assert self._eod is not None
            return _arrays(find_ends(self.tokens, self._eod, path.name), path, self.dtype)

        arrays = self._cache.arrays(f"{path.stem}-documents", key, build)
        self.sizes, self.pointers = arrays["sizes"], arrays["pointers"]
        self.doc_idx = np.arange(len(self.sizes) + 1, dtype=np.int64)
        if known is None and len(self.sizes) == 1 and self.num_tokens > 1_000_000:
            LOGGER.warning(
                f"{path}: the end-of-document id {self._eod} does not occur in {self.num_tokens} tokens, so it is "
                "one document. Was it made with another tokenizer? npy_eod sets the id."
            )


class MaskLabels(IndexedDataset):
    """Labels from a mask of one boolean per token: the token itself where true, -100 where false.

    Args:
        path: a `.npy` file of booleans, with or without header.
        data: the tokens it belongs to.
    """

    def __init__(self, path: str | Path, data: IndexedDataset) -> None:
        self.prefix, self._data = str(path), data
        self._open()

    def _open(self) -> None:
        self._content, found = read_npy(Path(self.prefix), "bool")
        if found.itemsize != 1:
            raise UserError(f"{self.prefix} holds {found} values; a label mask holds one boolean per token.")
        if self._content.size != self._data.num_tokens:
            raise UserError(
                f"{self.prefix} does not go with {self._data.prefix}: {self._content.size} booleans for "
                f"{self._data.num_tokens} tokens."
            )
        self.dtype = np.dtype(np.int32)
        self.sizes, self.pointers, self.doc_idx = self._data.sizes, self._data.pointers, self._data.doc_idx

    @property
    def num_tokens(self) -> int:
        return self._content.size

    @property
    def tokens(self) -> np.ndarray:
        """All labels, made in memory: 4 bytes per token."""
        return np.where(self._bin != 0, self._data.tokens.astype(np.int32), np.int32(IGNORE))

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Labels `[offset, offset + length)` of item `index`, int32."""
        tokens = self._data.get(index, offset, length)
        start = int(self.pointers[index]) // self._data.dtype.itemsize + offset
        return np.where(self._content.read(start, len(tokens)) != 0, tokens.astype(np.int32), np.int32(IGNORE))

    __getitem__ = get


def read_npy(path: Path, dtype: str | None) -> tuple[MappedFile, np.dtype]:
    """The bytes of the values in a one-dimensional `.npy` file, and their type.

    `dtype` is for files without header, None detects it. Raises `UserError`.
    """
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{path} is empty.")
    content = MappedFile(path)
    if content.read(0, len(MAGIC)).tobytes() == MAGIC:
        try:
            values = np.load(path, mmap_mode="r")
        except Exception as error:  # numpy reads the header with Python's tokenizer, which raises errors of its own
            raise UserError(f"{path}: not a whole .npy file ({error}).") from error
        if values.ndim != 1 or values.dtype.kind not in "iub" or values.dtype.byteorder == ">":
            raise UserError(f"{path} holds {values.dtype} of shape {values.shape}; expected a flat array of ids.")
        return MappedFile(path, values.offset, values.nbytes), values.dtype  # type: ignore[attr-defined]
    found = np.dtype(dtype).newbyteorder("<") if dtype is not None else raw_dtype(content, path)
    if size % found.itemsize:
        raise UserError(
            f"{path}: {size} bytes are not a whole number of {found.name} ids: it is truncated, or npy_dtype is wrong."
        )
    return content, found


def raw_dtype(content: MappedFile, path: Path) -> np.dtype:
    """Whether raw ids have 16 or 32 bits. In 32-bit ids every second half is nearly zero; 16-bit ids are not like that.

    Raises `UserError` when it cannot be detected, as when all ids are small.
    """
    halves = np.concatenate([part[: len(part) // 4 * 4].view("<u2").reshape(-1, 2) for part in _probes(content)])
    lower, upper = halves.max(axis=0, initial=0).tolist()
    if upper >= _HIGHEST_HALF and content.size % 2 == 0:
        return np.dtype("<u2")
    if lower >= _HIGHEST_HALF and content.size % 4 == 0:
        return np.dtype("<u4")
    raise UserError(f"{path}: the width of an id cannot be detected. Set npy_dtype (uint16 or uint32).")


def find_ends(tokens: np.ndarray, eod: int, what: str) -> np.ndarray:
    """Where documents end, `[documents]` int64: after every `eod`, and at the end of the file."""
    starts = range(0, len(tokens), _CHUNK)
    steps = progress(starts, what=f"documents of {what}", unit=f"x {_CHUNK >> 20}Mi tokens")
    ends = [np.flatnonzero(tokens[start : start + _CHUNK] == eod) + (start + 1) for start in steps]
    joined = np.concatenate(ends).astype(np.int64, copy=False) if ends else np.empty(0, np.int64)
    if not len(joined) or int(joined[-1]) != len(tokens):
        joined = np.append(joined, len(tokens))
    return joined


def read_ends(borders: Path, path: Path, tokens: int) -> np.ndarray:
    """Where documents end according to Dolma's list: `start,end,...` per line, without gaps, up to the end."""
    try:
        with gzip.open(borders, "rt", encoding="utf-8") as file:
            rows: np.ndarray = np.fromiter(_borders(file.readline), dtype=np.dtype((np.int64, 2)))
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{borders}: not a list of document borders `start,end,...` ({error}).") from error
    starts, ends = rows[:, 0], rows[:, 1]
    follows = len(rows) > 0 and starts[0] == 0 and bool((starts[1:] == ends[:-1]).all() and (ends >= starts).all())
    if not follows or int(ends[-1]) != tokens:
        last = int(ends[-1]) if len(rows) else 0
        raise UserError(
            f"{borders} does not describe {path}: its documents must follow one another and end at token {tokens}, "
            f"the last one ends at {last}. Remove it to find the documents by npy_eod."
        )
    return ends


def _borders(readline: Callable[[], str]) -> Iterator[tuple[int, int]]:
    while line := readline():
        if line.strip():
            start, end = line.split(",", 2)[:2]
            yield int(start), int(end)


def _arrays(ends: np.ndarray, path: Path, dtype: np.dtype) -> Arrays:
    sizes = np.diff(ends, prepend=0)
    if int(sizes.max()) > MAX_ITEM:
        raise UserError(f"{path}: a document of {int(sizes.max())} tokens. Is npy_eod the id that ends documents?")
    return {"sizes": sizes.astype(np.int32), "pointers": (ends - sizes) * dtype.itemsize}


def _identity(path: Path) -> list[object]:
    """What changes when a file is written again, without reading gigabytes."""
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]


def _probes(content: MappedFile) -> list[np.ndarray]:
    """Bytes at the start, in the middle and at the end, from multiples of 4."""
    places = sorted({0, max(0, content.size // 8 * 4), max(0, (content.size - _PROBE) // 4 * 4)})
    return [content.read(at, min(_PROBE, content.size - at)) for at in places]
