"""What a data path may be: a `.bin`/`.idx` pair, a `.npy` file of token ids, or a glob of either, joined into one."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megatron.data.tokens.cache import IndexCaches
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.mapped_file import allow_open_files
from megatron.data.tokens.npy import MaskLabels, NpyTokens
from megatron.data.tokens.prefixes import MAKE_CHATS, MAKE_TEXTS, find_prefix
from megatron.errors import UserError
from megatron.neox_arguments.schema_data import DataConfig

_FILES_EACH = 4  # open files of a dataset: its index or the arrays of its documents, its tokens


@dataclass(frozen=True)
class TokenFiles:
    """Opens data paths.

    Attributes:
        eod: the id that ends a document in `.npy` files (`npy_eod`).
        dtype: type of the ids in `.npy` files without header (`npy_dtype`); None detects it.
        caches: keep the document borders of `.npy` files.
    """

    eod: int | None = None
    dtype: str | None = None
    caches: IndexCaches = field(default_factory=IndexCaches)

    @staticmethod
    def of(data: DataConfig, caches: IndexCaches | None = None) -> TokenFiles:
        """With the settings of the data keys."""
        caches = caches if caches is not None else IndexCaches(data.data_cache_path, data.use_shared_fs)
        return TokenFiles(data.npy_eod, data.npy_dtype, caches)

    def open(self, path: str | Path) -> IndexedDataset:
        """The dataset at `path`. Raises `UserError`."""
        found = find_files(path)
        allow_open_files(_FILES_EACH * len(found))
        parts = [self._open_one(one) for one in found]
        return parts[0] if not is_glob(path) else JoinedTokens(parts, str(path))

    def open_labels(self, path: str | Path, data: IndexedDataset) -> IndexedDataset:
        """The labels at `path` that belong to `data`: a dataset with -100, or `.npy` masks. Raises `UserError`."""
        found = find_files(path, MAKE_CHATS)
        if len(found) != len(data.parts):
            raise UserError(f"{path}: {len(found)} label files for the {len(data.parts)} token files of {data.prefix}.")
        parts = [
            MaskLabels(one, part) if one.endswith(".npy") else IndexedDataset(one)
            for one, part in zip(found, data.parts, strict=True)
        ]
        return parts[0] if not is_glob(path) else JoinedTokens(parts, str(path))

    def _open_one(self, path: str) -> IndexedDataset:
        if path.endswith(".npy"):
            return NpyTokens(path, eod=self.eod, dtype=self.dtype, cache=self.caches.of(path))
        return IndexedDataset(path)


def with_eod(data: DataConfig, eod: int) -> DataConfig:
    """The data keys with `eod`, the tokenizer's end of a document, as `npy_eod` unless that is set."""
    return replace(data, npy_eod=eod) if data.npy_eod is None else data


class JoinedTokens(IndexedDataset):
    """Several token files as one: the items of `parts`, one after the other. `prefix` is the glob that found them.

    `tokens` copies everything into memory; go through `parts` instead.
    """

    def __init__(self, parts: Sequence[IndexedDataset], prefix: str) -> None:
        self._parts, self.prefix = list(parts), prefix
        self._open()

    def _open(self) -> None:
        parts = self._parts
        self.dtype = np.result_type(*(part.dtype for part in parts))
        self.sizes = np.concatenate([part.sizes for part in parts])
        self._first = np.cumsum([0, *(len(part) for part in parts)])
        # Where each item is, counted in tokens of all parts: there is no one file for byte offsets.
        self.pointers = np.cumsum(self.sizes, dtype=np.int64) - self.sizes
        ends = [part.doc_idx[1:] + first for part, first in zip(parts, self._first[:-1], strict=True)]
        self.doc_idx = np.concatenate([np.zeros(1, np.int64), *ends])

    @property
    def parts(self) -> list[IndexedDataset]:
        return self._parts

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self._parts)

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([part.tokens for part in self._parts])

    def warm_up(self) -> None:
        """Read all token files once."""
        for part in self._parts:
            part.warm_up()

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `[offset, offset + length)` of item `index`, as the part that holds it gives them."""
        if not 0 <= index < len(self.sizes):
            raise IndexError(f"{self.prefix}: item {index} of {len(self.sizes)}")
        which = int(np.searchsorted(self._first, index, side="right")) - 1
        return self._parts[which].get(index - int(self._first[which]), offset, length)

    __getitem__ = get


def is_glob(path: str | Path) -> bool:
    """Whether a data path is a pattern of files; an existing file with such a name is not."""
    return glob.has_magic(str(path)) and not Path(path).exists() and not Path(f"{path}.idx").exists()


def find_files(path: str | Path, remedy: str = MAKE_TEXTS) -> list[str]:
    """The prefixes and `.npy` files that a data path means, sorted by name. Raises `UserError` with `remedy` when there
    is none."""
    if not is_glob(path):
        return [_find_one(str(path), remedy)]
    pattern = str(path)
    if pattern.endswith(".npy"):
        found = glob.glob(pattern, recursive=True)
    else:
        index = pattern.removesuffix(".bin").removesuffix(".idx") + ".idx"
        found = [find_prefix(one) for one in glob.glob(index, recursive=True)]
    if not found:
        raise UserError(f"data path: no .npy or .idx file matches {pattern!r}.")
    return sorted(found)


def _find_one(path: str, remedy: str) -> str:
    if path.endswith(".npy"):
        if not os.path.isfile(path):
            raise UserError(f"data path: {path} does not exist.")
        return path
    # Not `Path.exists`, which raises for what is longer than a file name may be.
    if not os.path.exists(f"{path}.idx") and os.path.isfile(f"{path}.npy"):
        return f"{path}.npy"
    return find_prefix(path, remedy)
