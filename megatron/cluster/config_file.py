"""The resolved config on its way to the ranks: a private file that disappears with the job.

A launcher that is killed cannot remove its file; the next one on that machine does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

_PREFIX = ".deepy-resolved-"


@contextlib.contextmanager
def config_file(text: str, folder: Path | None = None) -> Iterator[Path]:
    """A file holding `text`, readable by its owner alone, removed at the end.

    `folder` (created if need be) is for jobs on several hosts, where a shared file system lets any rank 0 read it;
    by default the file is in the machine's temporary folder.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    _remove_left_over(Path(tempfile.gettempdir() if folder is None else folder))
    prefix = f"{_PREFIX}{os.getpid()}-{_here()}."
    handle, name = tempfile.mkstemp(prefix=prefix, suffix=".json", dir=folder)  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        yield Path(name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _here() -> str:
    """Where process ids mean the same: containers may share the host's name and its temporary folder."""
    try:
        return f"{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _remove_left_over(folder: Path) -> None:
    """Remove this user's files of launchers of this machine that no longer run."""
    for path in folder.glob(f"{_PREFIX}*.json"):
        owner, _, rest = path.name.removeprefix(_PREFIX).partition("-")
        if owner.isdigit() and rest.rsplit(".", 2)[0] == _here() and not psutil.pid_exists(int(owner)):
            with contextlib.suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    path.unlink()
