"""Index arrays on disk: keyed by content, built by one process per file system, published by rename.

The name of an entry is a hash of everything its arrays depend on, so a changed corpus, split or seed can never meet
stale arrays. A lock only saves the other processes the work: entries appear whole under their final name, so without a
working lock the result is the same, built more than once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import UserError
from megatron.log import Once, get_logger

LOGGER = get_logger(__name__)
_ONCE = Once(LOGGER)

Arrays = dict[str, np.ndarray]


def content_key(description: dict[str, Any], *arrays: np.ndarray) -> str:
    """Hex hash of a JSON-able description and the bytes of some arrays."""
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for array in arrays:
        digest.update(f"|{array.dtype.str}{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def index_folder(prefix: str | Path, shared: bool = True) -> Path:
    """Where indices of the dataset at `prefix` are kept: `index_cache` beside it.

    With `shared` false (`use_shared_fs: false`) each node has its own folder, whatever the file system.
    """
    folder = Path(prefix).resolve().parent
    return folder / ("index_cache" if shared else f"index_cache.{os.uname().nodename}")


class IndexCache:
    """Named arrays under one folder; without a folder, or where it cannot be written, they are built in memory."""

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = Path(folder) if folder is not None else None

    def arrays(self, name: str, key: str, build: Callable[[], Arrays]) -> Arrays:
        """The arrays of entry `key`, memory-mapped; `build` makes them when no process has yet.

        `name` is for people who look into the folder. Raises `UserError` when an entry is damaged or the disk is full.
        """
        if self.folder is None:
            return build()
        entry = self.folder / f"{name}-{key[:32]}"
        if entry.is_dir():
            return _load(entry, key)
        if not _writable(self.folder):
            _ONCE.warning(f"{self.folder} cannot be written, so every process builds its own sample index in memory")
            return build()
        with _lock(self.folder / f"{entry.name}.lock", entry):
            if not entry.is_dir():
                _publish(entry, key, build())
        return _load(entry, key)


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


@contextmanager
def _lock(path: Path, entry: Path) -> Iterator[None]:
    """Hold the lock file, or return when `entry` is there. The lock ends with the process that holds it."""
    with path.open("w") as file:
        announced, start = False, time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if entry.is_dir():
                    break
                if not announced and time.monotonic() - start > 5:
                    announced = True
                    LOGGER.info(f"waiting for another process to build {entry}")
                time.sleep(0.02)
            except OSError:  # this file system has no locks
                break
        try:
            yield
        finally:
            # After the entry is published nobody needs the lock file any more; who still waits on it finds the entry.
            if entry.is_dir():
                path.unlink(missing_ok=True)


def _publish(entry: Path, key: str, arrays: Arrays) -> None:
    temp = None
    try:
        temp = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", suffix=".tmp", dir=entry.parent))
        temp.chmod(entry.parent.stat().st_mode)  # mkdtemp makes it private; others read the cache too
        meta: dict[str, Any] = {"key": key, "arrays": {}}
        for name, array in arrays.items():
            with (temp / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
            meta["arrays"][name] = {"dtype": array.dtype.str, "shape": list(array.shape)}
        (temp / "meta.json").write_text(json.dumps(meta, indent=1))
        try:
            os.rename(temp, entry)
        except OSError:
            if not entry.is_dir():  # else another process was first, with the same arrays
                raise
    except OSError as error:
        raise UserError(f"the sample index cannot be written to {entry}: {error.strerror}.") from error
    finally:
        if temp is not None:
            shutil.rmtree(temp, ignore_errors=True)


def _load(entry: Path, key: str) -> Arrays:
    try:
        meta = json.loads((entry / "meta.json").read_text())
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r") for name in meta["arrays"]}
        right = meta["key"] == key and all(
            array.dtype.str == meta["arrays"][name]["dtype"] and list(array.shape) == meta["arrays"][name]["shape"]
            for name, array in arrays.items()
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{entry} is damaged ({error}). Remove that folder; it will be built again.") from error
    if not right:
        raise UserError(f"{entry} does not hold what its name says. Remove that folder; it will be built again.")
    return arrays
