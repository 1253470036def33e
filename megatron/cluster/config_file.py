"""The resolved config on its way to the ranks: a private file that disappears with the job."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def config_file(text: str, folder: Path | None = None) -> Iterator[Path]:
    """A file holding `text`, readable by its owner alone, removed at the end.

    `folder` (created if need be) is for jobs on several hosts, where a shared file system lets any rank 0 read it;
    by default the file is in the machine's temporary folder.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".deepy-resolved-", suffix=".json", dir=folder)  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        yield Path(name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
