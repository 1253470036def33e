"""`manifest.json`: what a checkpoint holds. Written last: where it is, the other files are complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout
from megatron.checkpoint.neox_names import NEOX
from megatron.checksums import file_crc32
from megatron.errors import UserError

_PACKAGES = ("torch", "deepspeed", "numpy", "transformers")


@dataclass(frozen=True)
class ParameterEntry:
    """How one parameter is stored in the files: fields of `mpu.sharding.ParamSpec`.

    `shape` is the full logical shape (vocabulary unpadded), `split_dim`, `blocks` and `padded` are how the
    tensor-parallel files divide it, `dtype` is that of the weight files.
    """

    shape: tuple[int, ...]
    split_dim: int | None
    blocks: tuple[int, ...]
    padded: int | None
    dtype: str


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and CRC-32 of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except its tensors.

    Attributes:
        step: optimizer steps done (NeoX's `iteration`).
        consumed: training samples consumed so far, over all data ranks.
        layout: `tp`, `pp`, `dp` sizes and the tensor-parallel size `files_tp` that the tensor files are cut for.
        heads: `num_attention_heads` and `num_kv_heads`, which fix the row order of fused QKV on disk.
        optimizer: whether optimizer state was saved.
        parameters: by canonical name.
        config: the resolved configuration, flat NeoX keys.
        names: of the parameters inside the weight files: `neox`, or `transformer_engine` (neox_names.py).
    """

    step: int
    consumed: int
    layout: dict[str, int]
    heads: dict[str, int]
    optimizer: bool
    parameters: dict[str, ParameterEntry]
    files: dict[str, FileEntry]
    config: dict[str, Any]
    git: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""
    names: str = NEOX
    format: int = layout.FORMAT_VERSION

    @classmethod
    def empty(cls, step: int) -> Manifest:
        """For a checkpoint of which nothing but the step is known."""
        return cls(step, consumed=0, layout={}, heads={}, optimizer=False, parameters={}, files={}, config={})

    def write(self, folder: Path, durable: bool = True) -> None:
        """Write it into `folder`; `durable`: wait until it is on the disk."""
        path = folder / layout.MANIFEST
        with open(path, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            if durable:
                os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint folder. Raises `UserError` when there is none or it cannot be understood."""
        path = folder / layout.MANIFEST
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{folder} is not a complete checkpoint of Deepy: it has no {layout.MANIFEST}") from None
        except (ValueError, OSError) as error:
            raise UserError(f"{path} cannot be read ({error}): the checkpoint is damaged; use another step") from error
        if raw.get("format", 0) > layout.FORMAT_VERSION:
            raise UserError(
                f"{path} has format version {raw['format']}, written by a newer Deepy; "
                f"this one reads up to {layout.FORMAT_VERSION}. Update Deepy."
            )
        try:
            raw["parameters"] = {
                name: ParameterEntry(tuple(p["shape"]), p["split_dim"], tuple(p["blocks"]), p["padded"], p["dtype"])
                for name, p in raw["parameters"].items()
            }
            raw["files"] = {name: FileEntry(**entry) for name, entry in raw["files"].items()}
            return cls(**raw)
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} lacks or misnames a field ({error}): the checkpoint is damaged") from error

    def missing(self, folder: Path, checksums: bool = False) -> str | None:
        """What is wrong with the files of `folder`; None when all exist with the right size.

        `checksums` also reads every file and compares its CRC-32.
        """
        for name, entry in self.files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if (size := path.stat().st_size) != entry.bytes:
                return f"{name} has {size} bytes, expected {entry.bytes}"
            if checksums:
                if file_crc32(path) != entry.crc32:
                    return f"{name} does not match its checksum"
        return None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Commit of the running source, with `-dirty` when it was changed; None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def now() -> str:
    """UTC time as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
