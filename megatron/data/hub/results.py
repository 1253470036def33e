"""`pipeline_results.json`: what a prepared dataset contains, and which stages of its preparation are done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.errors import UserError
from megatron.files import read_json, write_atomically
from megatron.log import get_logger

NAME = "pipeline_results.json"
FORMAT_VERSION = 1

logger = get_logger(__name__)


class Results:
    """The file's content. `values`: the keys of GPT-NeoX's fork and ours; `stages`: per stage a key of its inputs, and
    its results; `stamps`: digests of local files (see `records.Stamps`).

    The file is written only after a stage is done.
    """

    def __init__(self, folder: Path) -> None:
        """Reads what an earlier command left in `folder`; an unreadable file is ignored with a warning."""
        self.path = folder / NAME
        self.values: dict[str, Any] = {}
        earlier = _read(self.path)
        self.stages: dict[str, dict[str, Any]] = earlier.get("stages", {})
        self.stamps: dict[str, list[Any]] = earlier.get("stamps", {})
        self.hub_files: list[str] = earlier.get("hub_files", [])
        self.request: dict[str, Any] | None = earlier.get("request")

    def done(self, stage: str, key: str) -> dict[str, Any] | None:
        """The results of a stage that was done with that key, else None."""
        found = self.stages.get(stage)
        return found if found is not None and found.get("key") == key else None

    def finish(self, stage: str, key: str, **results: Any) -> dict[str, Any]:
        """Add a stage that is done, and write the file."""
        self.stages[stage] = {"key": key, **results}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.write("started")
        return self.stages[stage]

    def write(self, status: str, error: str | None = None) -> None:
        """Write the file if its folder exists (temporary name, then rename)."""
        if not self.path.parent.is_dir():
            return
        content = {
            "format_version": FORMAT_VERSION,
            **self.values,
            "status": status,
            **({"error": error} if error else {}),
            "request": self.request,
            "hub_files": self.hub_files,
            "stages": self.stages,
            "stamps": self.stamps,
        }
        write_atomically(self.path, json.dumps(content, indent=2) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except UserError:
        content = {}
    if content.get("format_version") != FORMAT_VERSION:
        logger.warning(f"{path}: written by another version; every stage is done again")
        return {}
    return content
