"""The files that the inputs named on a command line stand for."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from megatron.data.tokenise.compression import COMPRESSIONS
from megatron.data.tokenise.formats import READERS, kind_of
from megatron.errors import UserError

# What lies in a folder beside the documents: what our tools write next to their datasets, and what `datasets` writes
# next to its arrow files.
WRITTEN = (".manifest.json", "_metadata.json")
OF_SAVED = ("dataset_info.json", "state.json", "dataset_dict.json")


def find_inputs(names: Iterable[str]) -> list[Path]:
    """The files that command-line inputs mean: paths, comma-joined lists, globs, folders (every file of a known kind).

    `@FILE` stands for the inputs that FILE names, one a line. The order given is kept; what a glob or a folder stands
    for comes sorted by name. Raises `UserError` when a name stands for nothing or a file is of an unknown kind.
    """
    found: list[Path] = []
    for name in names:
        # Not `Path.exists`, which raises for a list that is longer than the name of a file may be.
        if name.startswith("@") and not os.path.exists(name):
            found += find_inputs(_listed(Path(name[1:])))
            continue
        for part in [name] if os.path.exists(name) else [part for part in name.split(",") if part]:
            found += _expand(part)
    for path in found:
        if kind_of(path) not in READERS or (path.suffix in COMPRESSIONS and kind_of(path) in (".parquet", ".arrow")):
            raise UserError(
                f"{path}: unknown kind of file. Known: {', '.join(READERS)}, and all but the last two also compressed "
                f"as {', '.join(COMPRESSIONS)}"
            )
    return found


def _listed(path: Path) -> list[str]:
    """The lines of a list of files, blank ones and comments left out."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"@{path}: a list of input files, which cannot be read: {error}") from error
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise UserError(f"@{path}: a list of input files that names none")
    return names


def _expand(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if os.path.isdir(path):
        files = sorted(file for file in path.rglob("*") if kind_of(file) in READERS and _is_input(file))
        if not files:
            raise UserError(f"{name}: no file of a known kind in this folder. Known: {', '.join(READERS)}")
        return files
    if os.path.exists(path):
        return [path]
    matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
    if not matches:
        shown = name if len(name) <= 200 else f"{name[:200]}..."
        raise UserError(f"{shown}: no such file" + (" (no match)" if glob.has_magic(name) else ""))
    return matches


def _is_input(file: Path) -> bool:
    """Whether a file found in a folder is one of its documents."""
    return file.is_file() and not file.name.endswith(WRITTEN) and file.name not in OF_SAVED
