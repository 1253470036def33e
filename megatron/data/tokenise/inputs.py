"""The input files that a command line names."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.data.tokenise.compression import COMPRESSIONS, ending_of
from megatron.data.tokenise.formats import READERS, TEXTS, kind_of
from megatron.errors import UserError

# Files of a folder that are not documents: what our tools write next to datasets, and `datasets` next to arrow files.
WRITTEN = (".manifest.json", "_metadata.json")
OF_SAVED = ("dataset_info.json", "state.json", "dataset_dict.json")


def find_inputs(names: Iterable[str], *, texts: bool = False, without: Sequence[Path] = ()) -> list[Path]:
    """The files of command-line inputs: paths, comma-joined lists, globs, folders (every file of a known kind).

    With `texts`, source code and markup are plain text, and a folder without `.jsonl`, `.parquet` and the like stands
    for all its plain texts; without, a README beside the data of a glob is no document.
    The files and folders `without` (real paths) are left out where a folder above them is named.

    `@FILE` stands for the inputs that FILE lists, one a line. The order given is kept; the files of a glob or folder
    are sorted by name. Raises `UserError` for a name without files and for a file of an unknown kind.
    """
    found: list[Path] = []
    for name in names:
        # Not `Path.exists`, which raises for a list that is longer than a file name may be.
        if name.startswith("@") and not os.path.exists(name):
            found += find_inputs(_read_list(Path(name[1:])), texts=texts, without=without)
            continue
        for part in [name] if os.path.exists(name) else [part for part in name.split(",") if part]:
            found += _expand(part, texts, without)
    for path in found:
        kind = kind_of(path)
        known = kind in READERS or (texts and kind in TEXTS)
        if not known or (ending_of(path) in COMPRESSIONS and kind in (".parquet", ".arrow")):
            also = "source code and markup are plain text" if texts else "plain text has to be called .txt"
            raise UserError(
                f"{path}: unknown kind of file. Known: {', '.join(READERS)}, and all but the last two also compressed "
                f"as {', '.join(COMPRESSIONS)}; {also}"
            )
    return found


def _read_list(path: Path) -> list[str]:
    """The lines of a list of files, without blank ones and comments."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"@{path}: cannot read this list of input files: {error}") from error
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise UserError(f"@{path}: this list of input files is empty")
    return names


def _expand(name: str, texts: bool, without: Sequence[Path]) -> list[Path]:
    path = Path(name).expanduser()
    if os.path.isdir(path):
        inside = _inputs_of_folder(path, without)
        files = _texts_of_folder(path, inside) if texts else []
        files = files or sorted(file for file in inside if kind_of(file) in READERS)
        if not files:
            known = dict.fromkeys((*READERS, *(TEXTS if texts else ())))
            raise UserError(f"{name}: no file of a known kind in this folder. Known: {', '.join(known)}")
        return files
    if os.path.exists(path):
        return [path]
    matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
    if not matches:
        shown = name if len(name) <= 200 else f"{name[:200]}..."
        raise UserError(f"{shown}: no such file" + (" (no match)" if glob.has_magic(name) else ""))
    return matches


def _inputs_of_folder(path: Path, without: Sequence[Path]) -> list[Path]:
    root = Path(os.path.realpath(path))
    left_out = tuple(f"{one}{os.sep}" for one in without if root in one.parents)
    files = filter(_is_input, path.rglob("*"))
    return [file for file in files if not f"{root / file.relative_to(path)}{os.sep}".startswith(left_out)]


def _texts_of_folder(path: Path, inside: Sequence[Path]) -> list[Path]:
    """Its plain texts, without hidden files; none if it has files of many documents, which are meant then."""
    files = [file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if any(kind_of(file) in READERS and kind_of(file) not in (".txt", ".json") for file in files):
        return []
    return sorted(file for file in files if kind_of(file) in TEXTS)


def _is_input(file: Path) -> bool:
    """Whether a file found in a folder is one of its documents."""
    return file.is_file() and not file.name.endswith(WRITTEN) and file.name not in OF_SAVED
