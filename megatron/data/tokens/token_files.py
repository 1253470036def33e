"""What a data path may be: a `.bin`/`.idx` pair, a `.npy` file of token ids, or a glob of either, joined into one."""

from __future__ import annotations

import glob
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron.data.tokens.cache import IndexCaches
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.joined import JoinedTokens
from megatron.data.tokens.npy import MaskLabels, NpyTokens
from megatron.data.tokens.pieces import allow_open_files
from megatron.data.tokens.prefixes import find_prefix
from megatron.errors import UserError
from megatron.neox_arguments.schema_data import DataConfig

_FILES_EACH = 4  # open files of a dataset: its index or the arrays of its documents, its tokens


@dataclass(frozen=True)
class TokenFiles:
    """Opens data paths.

    Attributes:
        eod: the id that ends a document in `.npy` files (`npy_eod`).
        dtype: type of the ids in `.npy` files without header (`npy_dtype`); None finds it out.
        caches: keep the document borders of `.npy` files.
    """

    eod: int | None = None
    dtype: str | None = None
    caches: IndexCaches = field(default_factory=IndexCaches)

    @staticmethod
    def of(data: DataConfig, caches: IndexCaches | None = None) -> TokenFiles:
        """As the data keys say."""
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
        found = find_files(path)
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


def open_tokens(
    path: str | Path, *, eod: int | None = None, dtype: str | None = None, caches: IndexCaches | None = None
) -> IndexedDataset:
    """The tokens at a data path of any kind; see `TokenFiles`."""
    return TokenFiles(eod, dtype, caches if caches is not None else IndexCaches()).open(path)


def with_eod(data: DataConfig, eod: int) -> DataConfig:
    """The data keys of a run whose tokenizer ends documents with `eod`, which `npy_eod` overrules."""
    return replace(data, npy_eod=eod) if data.npy_eod is None else data


def is_glob(path: str | Path) -> bool:
    """Whether a data path means several files. A file whose name merely looks so means itself."""
    return glob.has_magic(str(path)) and not Path(path).exists() and not Path(f"{path}.idx").exists()


def find_files(path: str | Path) -> list[str]:
    """The prefixes and `.npy` files that a data path means, sorted by name. Raises `UserError` when there is none."""
    if not is_glob(path):
        return [_find_one(str(path))]
    pattern = str(path)
    if pattern.endswith(".npy"):
        found = glob.glob(pattern, recursive=True)
    else:
        index = pattern.removesuffix(".bin").removesuffix(".idx") + ".idx"
        found = [find_prefix(one) for one in glob.glob(index, recursive=True)]
    if not found:
        raise UserError(f"data path: nothing fits {pattern!r}. A pattern names .npy files or .idx files.")
    return sorted(found)


def _find_one(path: str) -> str:
    if path.endswith(".npy"):
        if not Path(path).is_file():
            raise UserError(f"data path: there is no file {path}.")
        return path
    if not Path(f"{path}.idx").exists() and Path(f"{path}.npy").is_file():
        return f"{path}.npy"
    return find_prefix(path)
