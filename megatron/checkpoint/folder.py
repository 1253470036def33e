"""A checkpoint folder in the making: written under a temporary name, published by rename, or thrown away.

At every moment a reader sees either the whole checkpoint or none: the manifest is written after everything else is
durable, then the folder gets its name, then `latest` is replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.checkpoint import layout
from megatron.checkpoint.manifest import FileEntry, Manifest
from megatron.checkpoint.tensor_file import TensorFileWriter, sync, write_bytes

_LEFT_BEHIND = (".tmp-global_step", ".trash-global_step", ".replaced-global_step")


class CheckpointFolder:
    """Where one process writes its files of the checkpoint of `step` in `root`.

    One process (rank 0) calls `prepare` before anybody writes, and `publish` or `discard` after everybody has.
    `files` lists what this process wrote. `durable`: wait until everything is on the disk before it gets its name, so
    that it survives a loss of power too; without it, it survives whatever happens to processes.
    """

    def __init__(self, root: str | Path, step: int, durable: bool = True) -> None:
        self.root = Path(root)
        self.step = step
        self.durable = durable
        self.path = self.root / layout.temporary_folder(step)
        self.final = self.root / layout.step_folder(step)
        self.files: dict[str, FileEntry] = {}

    def prepare(self) -> None:
        """Make an empty temporary folder; remove the leftovers of interrupted saves and deletions."""
        self.root.mkdir(parents=True, exist_ok=True)
        recover(self.root)
        self.path.mkdir()

    @contextmanager
    def tensor_file(self, name: str) -> Iterator[TensorFileWriter]:
        """Write a torch file tensor by tensor."""
        with TensorFileWriter(self.path / name) as writer:
            yield writer
        self.files[name] = FileEntry(writer.bytes, writer.crc32)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file (UTF-8); `name` may contain a folder."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a small file; `name` may contain a folder."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        done = write_bytes(path, data)
        self.files[name] = FileEntry(done.bytes, done.crc32)

    def sync(self) -> None:
        """Make this process's files durable."""
        if self.durable:
            for name in self.files:
                sync(self.path / name)

    def publish(self, manifest: Manifest, latest: bool = True) -> Path:
        """Complete the folder, give it its name and, if asked, point `latest` at it. Returns the final path."""
        manifest.write(self.path, self.durable)
        if self.durable:
            for folder in {(self.path / name).parent for name in manifest.files} | {self.path}:
                sync(folder)
        older = self.root / layout.replaced_folder(self.step)
        if self.final.exists():
            os.rename(self.final, older)
        os.rename(self.path, self.final)
        if self.durable:
            sync(self.root)
        if latest:
            write_latest(self.root, self.step, self.durable)
        shutil.rmtree(older, ignore_errors=True)
        return self.final

    def discard(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def write_latest(root: Path, step: int, durable: bool = True) -> None:
    """Point `latest` at a checkpoint, atomically."""
    temporary = root / f".{layout.LATEST}.tmp"
    temporary.write_text(layout.step_folder(step), encoding="utf-8")
    if durable:
        sync(temporary)
    os.replace(temporary, root / layout.LATEST)
    if durable:
        sync(root)


def recover(root: Path) -> None:
    """Undo or finish the leftovers of a killed process: only for the one who may write in `root`.

    A replaced checkpoint whose successor never got its name gets it back; half-written and half-deleted folders go.
    """
    for entry in root.iterdir():
        if not entry.name.startswith(_LEFT_BEHIND):
            continue
        final = root / entry.name.split("-", 1)[1]
        if entry.name.startswith(".replaced-") and not final.exists():
            os.rename(entry, final)
        else:
            shutil.rmtree(entry)
