"""`manifest.json`: what a checkpoint holds. Written last: where it is, the other files are complete."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout
from megatron.checkpoint.neox_names import NEOX
from megatron.checksums import file_crc32
from megatron.errors import UserError
from megatron.files import from_json, read_json
from megatron.home import LIBRARY

COMMIT_FILE = ".commit"  # in the root of a copy of the source that has no repository: the commit that it is
HEADS = ("num_attention_heads", "num_kv_heads")
_DTYPES = ("float32", "float16", "bfloat16", "float64")
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

    def check(self, name: str) -> None:
        """Raise `ValueError` when this cannot be a parameter called `name`."""
        layer, _, local = name.partition(".")
        fits = layer.isascii() and layer.isdigit() and len(layer) < 10 and local and self.dtype in _DTYPES
        fits = fits and min(self.shape, default=1) >= 0
        if self.split_dim is not None:
            fits = fits and 0 <= self.split_dim < len(self.shape) and min(self.blocks, default=1) > 0
            fits = fits and (not self.blocks or sum(self.blocks) == self.shape[self.split_dim])
            fits = fits and (self.padded is None or self.padded >= self.shape[self.split_dim])
        elif self.blocks or self.padded is not None:
            fits = False
        if not fits:
            raise ValueError(f"parameter {name[:80]!r} makes no sense: {self}")


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and CRC-32 of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class BaseEntry:
    """The checkpoint that has the frozen weights of this one: its folder, the tokens of its model, and the CRC-32 of
    its manifest (GPT-NeoX writes none)."""

    path: str
    vocab_size: int
    crc32: int | None


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
        config: the resolved configuration, flat NeoX keys; `read` gives an older one as it would be written now.
        names: of the parameters inside the weight files: `neox`, or `transformer_engine` (neox_names.py).
        base: who has the weights that it does not hold (base.py); None: it holds all.
        temporary: it is deleted once a later one is complete (`temporary_checkpoint_minutes`).
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
    temporary: bool = False
    base: BaseEntry | None = None
    format: int = layout.FORMAT_VERSION

    @property
    def trained(self) -> bool:
        """Whether a run wrote it: a converted checkpoint has no optimizer state and has consumed nothing."""
        return self.optimizer or self.consumed > 0

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
        """The manifest of a checkpoint folder. Raises `UserError` when there is none, or when it makes no sense."""
        path = folder / layout.MANIFEST
        try:
            raw = read_json(path, "The checkpoint is damaged.")
            version = raw.get("format", 0)
            if isinstance(version, int) and version > layout.FORMAT_VERSION:
                raise UserError(
                    f"{path} has format version {version}, written by a newer Deepy; "
                    f"this one reads up to {layout.FORMAT_VERSION}. Update Deepy."
                )
            manifest = from_json(cls, raw)
            manifest._check(layout.step_of(folder.name))
        except FileNotFoundError:
            raise UserError(f"{folder} is not a complete checkpoint of Deepy: it has no {layout.MANIFEST}") from None
        except ValueError as error:
            raise UserError(f"{path} was damaged or changed: {error}") from error
        return replace(manifest, config=_as_written_now(manifest.config))

    def _check(self, step: int | None) -> None:
        """Raise `ValueError` when the fields contradict one another, or `step`, that of the folder's name."""
        if step not in (None, self.step):
            raise ValueError(f"its step is {self.step}")
        if self.consumed < 0:
            raise ValueError(f"consumed is {self.consumed}")
        sizes = [self.layout.get(axis, 0) for axis in ("tp", "pp", "dp")]
        if min(sizes) < 1:
            raise ValueError(f"layout is {self.layout}")
        if self.parameters and min(self.heads.get(key, 0) for key in HEADS) < 1:
            raise ValueError(f"heads are {self.heads}")
        for name, entry in self.parameters.items():
            entry.check(name)
        layers = {layout.split_name(name)[0] for name in self.parameters}
        if len(layers) * sizes[0] > len(self.files):
            raise ValueError(
                f"it lists {len(self.files)} files, too few for {len(layers)} layers at layout {self.layout}"
            )
        expected = [layout.state_file(0)]
        for layer in sorted(layers):
            for rank in range(sizes[0]):
                expected += [layout.weights_file(layer, rank)]
                expected += [layout.optimizer_file(layer, rank)] if self.optimizer else []
        if unlisted := [name for name in expected if name not in self.files]:
            raise ValueError(f"it does not list {unlisted[0]}")

    def missing(self, folder: Path, checksums: bool = False) -> str | None:
        """What is wrong with the files of `folder`; None when all exist with the right size.

        `checksums` also reads every file and compares its CRC-32.
        """
        problems = (self.wrong_file(folder, name, checksums) for name in self.files)
        return next((problem for problem in problems if problem), None)

    def wrong_file(self, folder: Path, name: str, checksum: bool = True) -> str | None:
        """What is wrong with one file of `folder`, by size and, if asked, CRC-32; None when nothing is."""
        entry, path = self.files.get(name), folder / name
        if entry is None:
            return f"{name} is not listed in {layout.MANIFEST}"
        try:
            if not path.is_file():
                return f"{name} is missing"
            if (size := path.stat().st_size) != entry.bytes:
                return f"{name} has {size} bytes, expected {entry.bytes}"
            if checksum and (found := file_crc32(path)) != entry.crc32:
                return f"{name} was damaged: its CRC-32 is {found}, expected {entry.crc32}"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
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
    """Commit of the running source, with `-dirty` when it was changed; None outside a repository. A copy that was made
    of a commit says in `COMMIT_FILE` of which, whatever repository its folder lies in."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (LIBRARY / COMMIT_FILE).read_text(encoding="utf-8").strip() or None
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def now() -> str:
    """UTC time as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _as_written_now(config: dict[str, Any]) -> dict[str, Any]:
    """A saved configuration with keys whose meaning changed since, as the same model is described now.

    `use_separate_qk_norms` was enough for norms over all heads; now it goes with `use_qk_layernorm`, and a
    configuration that has it without is never saved.
    """
    if config.get("use_separate_qk_norms") and not (config.get("use_qk_layernorm") or config.get("qk_norm_per_head")):
        return {**config, "use_qk_layernorm": True}
    return config
