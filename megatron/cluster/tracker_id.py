"""One run in a tracker for one run folder, however often its job is started."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path

from megatron.files import write_atomically

FOLDER = "trackers"


def tracker_id(folder: Path | None, name: str, variable: str, env: Mapping[str, str] = os.environ) -> str | None:
    """The id of this run in a tracker: 32 characters in `<folder>/trackers/<name>`, made at the first start.

    None without a run folder, and when the user sets `variable`, by which the tracker takes an id from him.
    """
    if folder is None or env.get(variable):
        return None
    path = folder / FOLDER / name
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        text = ""
    if not re.fullmatch(r"[0-9a-zA-Z_-]{1,64}", text):
        text = uuid.uuid4().hex
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text + "\n")
    return text
