"""Files being written: named `.partial`, locked by one process at a time, kept only for a resume.

Every unfinished file of a dataset is `<name>.partial`. A lock of the operating system marks the ones in use; it ends
with the process, however that ends, so the files of a killed process can be distinguished from work in progress.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from megatron.errors import MachineError, UserError
from megatron.log import get_logger

PARTIAL = ".partial"
PATIENCE = 5.0  # seconds: workers of a killed process may hold its files for a moment

logger = get_logger(__name__)


class WriteError(MachineError, OSError):
    """The file system cannot write (disk full, quota, connection lost); one message, no traceback."""


def open_alone(path: str | Path, keep: int | None = None) -> IO[bytes]:
    """Open a partial file for writing: emptied, or with its first `keep` bytes kept. Its folder is made.

    Raises `UserError` when another process holds it, when it cannot be opened, or when it has fewer than `keep` bytes.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = _open_locked(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    found = os.fstat(file.fileno()).st_size
    if keep is not None and found < keep:
        file.close()
        raise UserError(
            f"{path} has {found} bytes, but {keep} were written: it was changed. Remove it and all other {PARTIAL} "
            "files of this dataset to start again."
        )
    file.truncate(keep or 0)
    file.seek(keep or 0)
    return file


def _open_locked(path: str | Path) -> IO[bytes]:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        file = os.fdopen(handle, "wb")  # of a handle: this does not empty the file
        try:
            _lock(handle, path)
            # Between the opening and the locking, its earlier holder may have renamed or removed it.
            if os.path.exists(path) and os.path.samestat(os.fstat(handle), os.stat(path)):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(handle: int, path: str | Path) -> None:
    deadline = time.monotonic() + PATIENCE
    try:
        while not _try_lock(handle) and time.monotonic() < deadline:
            time.sleep(0.05)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"another process is writing {path} now: wait for it, or give this one another output prefix (several "
            "machines on one corpus: --shard)"
        ) from error
    except OSError as error:  # some network file systems have no locks
        logger.warning(f"{path} cannot be locked ({error.strerror}): make sure that no other process writes it")


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
