"""Entries of checkpoint files, as they are in the files: for looking at one thing without knowing the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.foreign import load_foreign
from megatron.errors import UserError, nearest

_SUFFIXES = (".pt", ".ckpt", ".pth", ".bin")


def files_of(path: Path) -> list[Path]:
    """The torch files at `path`: itself, or those in the folder. Raises `UserError` when there are none."""
    found = [path] if path.is_file() else sorted(f for f in path.glob("*") if f.suffix in _SUFFIXES)
    if not found or any(file.suffix not in _SUFFIXES for file in found):
        raise UserError(f"{path} is not, and does not hold, torch files ({', '.join(_SUFFIXES)})")
    return found


def peek(path: Path, attributes: Sequence[str] = ()) -> Iterator[str]:
    """Every file with its entries, or those that `attributes` name (`/` goes inside: `args/num_layers`).

    Nothing in a file is run. Raises `UserError` when no file has an attribute.
    """
    missing = dict.fromkeys(attributes)
    known: dict[str, None] = {}
    for file in files_of(path):
        content = load_foreign(file)
        known |= dict.fromkeys(map(str, content))
        entries = {name: _inside(content, name) for name in attributes} if attributes else dict(content)
        there = {name: value for name, value in entries.items() if value is not _ABSENT}
        if not there:
            continue
        for name in there:
            missing.pop(name, None)
        yield f"{file.name}:"
        for name, value in there.items():
            yield from _lines(str(name), value, 1)
    if missing:
        name = next(iter(missing))
        raise UserError(f"--attributes: no file of {path} has {name}.{nearest(name, list(known))}")


_ABSENT = object()


def _inside(content: Any, name: str) -> Any:
    for part in name.split("/"):
        if not isinstance(content, Mapping) or part not in content:
            return _ABSENT
        content = content[part]
    return content


def _lines(name: str, value: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(value, Mapping):
        yield f"{indent}{name}: {len(value)} entries"
        for key, inner in value.items():
            yield from _lines(str(key), inner, depth + 1)
    elif isinstance(value, Tensor) and value.numel() != 1:
        kind = str(value.dtype).removeprefix("torch.")
        yield f"{indent}{name}: {list(value.shape)} {kind}, {value.numel() * value.element_size():,} bytes"
    elif isinstance(value, Tensor):
        yield f"{indent}{name}: {value.item()!r} ({str(value.dtype).removeprefix('torch.')})"
    elif isinstance(value, (list, tuple)) and len(value) > 8:
        yield f"{indent}{name}: {type(value).__name__} of {len(value)}"
    else:
        yield f"{indent}{name}: {value!r}"
