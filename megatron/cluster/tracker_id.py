"""One run in a tracker for one run folder, however often its job is started.

The ids lie in the folder and, for a start on another disk, in its checkpoints.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path

from megatron.files import write_atomically

FOLDER = "trackers"
_ID = re.compile(r"[0-9a-zA-Z_-]{1,64}")


def tracker_id(
    folder: Path | None, name: str, variable: str | None = None, env: Mapping[str, str] = os.environ
) -> str | None:
    """The id of this run in a tracker: 32 characters in `<folder>/trackers/<name>`, made at the first start.

    None without a run folder, and when the user sets `variable`, by which some trackers take an id from him.
    """
    if folder is None or (variable is not None and env.get(variable)):
        return None
    path = folder / FOLDER / name
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        text = ""
    if not _ID.fullmatch(text):
        text = uuid.uuid4().hex
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text + "\n")
    return text


def read_tracker_ids(folder: Path) -> dict[str, str]:
    """The ids in a run folder, by the names of their files."""
    files = sorted((folder / FOLDER).glob("*"))
    found = {file.name: file.read_text(encoding="ascii", errors="replace").strip() for file in files if file.is_file()}
    return {name: text for name, text in found.items() if _ID.fullmatch(text)}


def restore_tracker_ids(folder: Path, ids: Mapping[str, str]) -> None:
    """Write the ids that a checkpoint of this run holds, where the folder has no such file (an empty one asks for a
    new run)."""
    for name, text in ids.items():
        path = folder / FOLDER / name
        if _ID.fullmatch(name) and _ID.fullmatch(text) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text + "\n")
