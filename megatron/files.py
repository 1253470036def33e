"""Small files: they appear whole or not at all, and what cannot be read as what it should be is one message."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron.errors import UserError

T = TypeVar("T")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def write_atomically(path: Path, text: str) -> None:
    """Write a text file in UTF-8: a reader sees the old or the new content, never a part.

    Raises `OSError`, with nothing left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def refuse_lfs_pointer(path: Path) -> None:
    """Raise `UserError` when a clone without git-lfs has left a few lines of text in the place of the file."""
    if path.is_file() and path.stat().st_size < 1024:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise UserError(f"{path} is a git-lfs pointer, not the file: run `git lfs pull` in {path.parent}")


def read_json(path: Path, advice: str = "") -> dict[str, Any]:
    """The mapping that a JSON file holds. Raises `UserError` naming the file, with `advice`, for anything else in it.

    `FileNotFoundError` and `NotADirectoryError` pass: what a missing file means is the caller's to say.
    """
    try:
        refuse_lfs_pointer(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, a number of 5000 digits
        raise UserError(f"{path} cannot be read: {error}. {advice}".rstrip()) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} cannot be read: it holds {_in_words(content)} instead of a mapping. {advice}".rstrip())
    return content


def json_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    """The mapping that each line holds, None for one that holds none (as one that is half written); no empty lines."""
    for line in lines:
        if line.strip():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            yield entry if isinstance(entry, dict) else None


def number(value: Any) -> float | None:
    """A finite number as it is, None for anything else."""
    right = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if right else None


def whole(value: Any) -> int | None:
    """A whole number as it is, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def from_json(kind: type[T], content: Mapping[str, Any]) -> T:
    """A dataclass from its JSON form (`dataclasses.asdict`), lists becoming tuples where it has tuples.

    Raises `ValueError` naming the field that is missing, unknown or of another type.
    """
    hints = get_type_hints(kind)
    if unknown := sorted(map(str, content.keys() - hints.keys())):
        raise ValueError(f"unknown field {unknown[0][:80]!r}")
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in content and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"field {field.name!r} is missing")
    return kind(**{name: _typed(value, hints[name], name) for name, value in content.items()})


def _typed(value: Any, wanted: Any, where: str) -> Any:
    origin, inner = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        (wanted,) = (one for one in inner if one is not NoneType)
        return _typed(value, wanted, where)
    if is_dataclass(wanted) and isinstance(value, dict):
        try:
            return from_json(wanted, value)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if origin in (tuple, list, Sequence) and isinstance(value, list):
        items = [_typed(one, inner[0], where) for one in value]
        return items if origin is list else tuple(items)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        return {name: _typed(one, inner[1], f"{where}.{name}") for name, one in value.items()}
    if wanted in (int, str, bool) and type(value) is wanted:
        return value
    raise ValueError(f"field {where[:80]!r} holds {_in_words(value)}")


def _in_words(value: Any) -> str:
    words = {NoneType: "nothing", list: "a list", dict: "a mapping", str: "text", bool: "true or false"}
    return words.get(type(value), "a number")
