"""Index arrays on disk: keyed by content, built by one process per file system, published by rename.

The name of an entry is a hash of everything its arrays depend on, so a changed corpus, split or seed never gets
stale arrays. A lock only saves the other processes the work: entries appear complete under their final name, so
without a working lock the result is the same, built more than once. GPT-NeoX's `*_indexmap_*.npy` files, whose names
do not cover all that they depend on, are never read.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.tokens.cache_lock import hold_lock
from megatron.data.tokens.mapped_file import too_many_open
from megatron.errors import UserError, cannot_write
from megatron.log import Once, get_logger

LOGGER = get_logger(__name__)
_ONCE = Once(LOGGER)
_NO_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_WORTH_LOGGING = 5.0  # seconds of building

Arrays = Mapping[str, np.ndarray]


def content_key(description: dict[str, Any], *arrays: np.ndarray) -> str:
    """Hex hash of a JSON-able description and the bytes of some arrays (about 1.5 GB a second)."""
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for array in arrays:
        digest.update(f"|{array.dtype.str}{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def index_folder(prefix: str | Path, shared: bool = True, root: str | Path | None = None) -> Path:
    """Where indices of the dataset at `prefix` are stored: `root` (`data_cache_path`), or `index_cache` next to it.

    With `shared` false (`use_shared_fs: false`) each node has its own folder, whatever the file system.
    """
    parent = Path(prefix).resolve().parent
    while glob.has_magic(str(parent)) and not parent.is_dir():  # the data path is a pattern over folders
        parent = parent.parent
    folder = Path(root).expanduser() if root is not None else parent / "index_cache"
    return folder if shared else folder.with_name(f"{folder.name}.{os.uname().nodename}")


@dataclass(frozen=True)
class Entry:
    """One requested entry: its path (None: only in memory), whether it was built now, its bytes and the seconds."""

    name: str
    path: Path | None
    built: bool
    bytes: int
    seconds: float


class StoredArrays(Arrays):
    """The arrays of a published entry, memory-mapped. Pickled as their place: another process maps them when it first
    asks for one.

    Raises `UserError` when the entry is damaged.
    """

    def __init__(self, entry: Path, key: str) -> None:
        self._place = entry, key
        _ = self._mapped

    @cached_property
    def _mapped(self) -> dict[str, np.ndarray]:
        return _load(*self._place)

    def __getstate__(self) -> dict[str, Any]:
        return {"_place": self._place}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._mapped[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapped)

    def __len__(self) -> int:
        return len(self._mapped)


class IndexCache:
    """Named arrays under one folder; without a folder, or where it cannot be written, they are built in memory.

    `entries` lists the requested entries; several caches may share one list. `announce` gets a message before each
    build.
    """

    def __init__(
        self,
        folder: str | Path | None,
        entries: list[Entry] | None = None,
        announce: Callable[[str], None] = LOGGER.debug,
    ) -> None:
        self.folder = Path(folder) if folder is not None else None
        self.entries: list[Entry] = entries if entries is not None else []
        self._announce = announce

    def arrays(self, name: str, key: str, build: Callable[[], Arrays]) -> Arrays:
        """The arrays of entry `key`, memory-mapped; `build` makes them when no process has yet.

        `name` makes the folder readable. Raises `UserError` when an entry is damaged or the disk is full.
        """
        start = time.monotonic()
        path, built, arrays = self._find_or_build(name, key, build)
        seconds, size = time.monotonic() - start, sum(array.nbytes for array in arrays.values())
        self.entries.append(Entry(name, path, built, size, seconds))
        if built and seconds > _WORTH_LOGGING:
            LOGGER.info(f"built {path or f'the index of {name} in memory'}: {size / 1e6:.0f} MB in {seconds:.1f} s")
        return arrays

    def _find_or_build(self, name: str, key: str, build: Callable[[], Arrays]) -> tuple[Path | None, bool, Arrays]:
        if self.folder is None:
            return None, True, build()
        entry = self.folder / f"{name}-{key[:32]}"
        if _is_published(entry):
            return entry, False, StoredArrays(entry, key)
        if not _writable(self.folder):
            return None, True, self._in_memory(build)
        built = False
        with hold_lock(self.folder / f"{entry.name}.lock", entry.is_dir, f"to build {entry}") as held:
            if held:
                _remove_abandoned(entry)
            if not _is_published(entry):
                self._announce(f"building {entry}")
                arrays = build()
                if not _publish(entry, key, arrays):
                    return None, True, self._in_memory(lambda: arrays)
                built = True
        return entry, built, StoredArrays(entry, key)

    def _in_memory(self, build: Callable[[], Arrays]) -> Arrays:
        _ONCE.warning(
            f"{self.folder} cannot be written, so every process builds its own sample index in memory; "
            "data_cache_path names another folder for it"
        )
        return build()


class IndexCaches:
    """The caches of all datasets of a run.

    Args:
        root: one folder for all (`data_cache_path`); by default each dataset's own.
        shared: see `index_folder`.

    `announce` gets a message before each build; it may be changed at any time.
    """

    def __init__(self, root: str | Path | None = None, shared: bool = True) -> None:
        self.root, self.shared = root, shared
        self.entries: list[Entry] = []
        self.announce: Callable[[str], None] = LOGGER.debug

    def of(self, prefix: str | Path) -> IndexCache:
        """The cache for the dataset at `prefix`."""
        folder = index_folder(prefix, self.shared, self.root)
        return IndexCache(folder, self.entries, self._tell)

    @property
    def stored(self) -> bool:
        """Whether all entries that were asked for are on disk, none only in this process's memory."""
        return all(entry.path is not None for entry in self.entries)

    def _tell(self, message: str) -> None:
        self.announce(message)


def _is_published(entry: Path) -> bool:
    """Whether the entry is published. Reading the folder refreshes an NFS client's memory of missing files."""
    if entry.is_dir():
        return True
    try:
        with os.scandir(entry.parent) as found:
            return any(item.name == entry.name for item in found)
    except OSError:
        return False


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in _NO_WRITING:
            return False
        raise cannot_write(
            error, f"cannot make {folder} for sample indices: {_reason(error)}. data_cache_path names another folder."
        ) from error
    return os.access(folder, os.W_OK | os.X_OK)


def _remove_abandoned(entry: Path) -> None:
    """Remove the leftovers of killed builders of this entry; only the holder of the lock may."""
    for left in entry.parent.glob(f"{entry.name}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def _publish(entry: Path, key: str, arrays: Arrays) -> bool:
    """Write the entry under a temporary name and rename it; False where nothing may be written."""
    temp = None
    try:
        temp = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", suffix=".tmp", dir=entry.parent))
        temp.chmod(entry.parent.stat().st_mode & 0o7777)  # mkdtemp makes it private; others read the cache too
        meta: dict[str, Any] = {"key": key, "arrays": {}}
        for name, array in arrays.items():
            with (temp / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
            meta["arrays"][name] = {"dtype": array.dtype.str, "shape": list(array.shape)}
        with (temp / "meta.json").open("w") as text:
            json.dump(meta, text, indent=1)
            text.flush()
            os.fsync(text.fileno())
        _sync_folder(temp)
        try:
            os.rename(temp, entry)
        except OSError:
            # Another process was first, with the same arrays; or NFS repeated a rename whose answer was lost.
            if not _is_published(entry):
                raise
        _sync_folder(entry.parent)
    except OSError as error:
        if error.errno in _NO_WRITING:
            return False
        raise cannot_write(
            error,
            f"the sample index cannot be written to {entry}: {_reason(error)}. data_cache_path names another folder.",
        ) from error
    finally:
        if temp is not None:
            shutil.rmtree(temp, ignore_errors=True)
    return True


def _sync_folder(folder: Path) -> None:
    """Flush the folder's list of files to disk, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _load(entry: Path, key: str) -> dict[str, np.ndarray]:
    try:
        meta = json.loads((entry / "meta.json").read_text())
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r") for name in meta["arrays"]}
        right = meta["key"] == key and all(
            array.dtype.str == meta["arrays"][name]["dtype"] and list(array.shape) == meta["arrays"][name]["shape"]
            for name, array in arrays.items()
        )
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and (reason := too_many_open(entry, error)) is not None:
            raise reason from error
        raise UserError(f"{entry} is damaged ({error}). Remove that folder; it will be built again.") from error
    if not right:
        raise UserError(f"{entry} does not match its key. Remove that folder; it will be built again.")
    return arrays


def _reason(error: OSError) -> str:
    return error.strerror or f"{error} (bytes; the disk is full)"  # numpy's own, when a write ends early
