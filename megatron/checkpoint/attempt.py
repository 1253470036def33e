"""One attempt to save: work stops at the first error, and all ranks stop together."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

from megatron.checkpoint.agreement import agree
from megatron.checkpoint.find import list_checkpoints
from megatron.checkpoint.folder import CheckpointFolder
from megatron.errors import DeepyError, MachineError, NumericsError
from megatron.mpu.state import ParallelState


class SaveError(DeepyError):
    """A checkpoint could not be written. Its files are removed, and earlier checkpoints are untouched."""


class NoRoomError(SaveError, MachineError):
    """It could not be written because the machine gave out: disk full, file size limit, no thread, ..."""


class Attempt:
    """Runs pieces of work until one fails, then none: the rank still takes part in collective calls."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def run(self, work: Any, *arguments: Any) -> Any:
        if self.error is None:
            try:
                return work(*arguments)
            except Exception as error:  # the other ranks must learn of it before anybody stops
                self.error = error
        return None

    def stop_if_failed(self, folder: CheckpointFolder, needed: int, state: ParallelState) -> None:
        """Raise `SaveError` on every rank when the work failed on any, with nothing left of it. Collective.

        A `NumericsError` is not about the writing, and is raised as it is.
        """
        failures = agree(self.error, state)
        if not failures:
            return
        if state.rank == 0:
            folder.discard()
        rank, error = next(iter(failures.items()))
        if isinstance(error, NumericsError):
            raise error
        text = f"the checkpoint of step {folder.step} was not saved: rank {rank}: {error}."
        text += f" It needs {needed} bytes; {free_bytes(folder.root)} bytes are free in {folder.root}."
        kept = list_checkpoints(folder.root).steps
        text += f" Complete checkpoints there: {list(kept)}." if kept else " No complete checkpoint is there."
        kind = NoRoomError if isinstance(error, MachineError) else SaveError
        raise kind(text) from self.error


def free_bytes(root: Path) -> int:
    """Free space on the file system of a folder, which need not exist yet."""
    existing = next(path for path in (root, *root.resolve().parents) if path.exists())
    return shutil.disk_usage(existing).free


def check_free_space(folder: CheckpointFolder, needed: int) -> None:
    """Raise `OSError` (no space left) when `needed` bytes do not fit."""
    if (free := free_bytes(folder.root)) < needed:
        raise OSError(errno.ENOSPC, f"not enough space: {needed} bytes needed, {free} free", str(folder.root))
