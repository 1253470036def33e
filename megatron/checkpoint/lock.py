"""A lock in `save`: two jobs must not write the same checkpoints.

`lock.json` names host, process and a token; a thread touches it every few seconds. A lock is stale when its process on
this host is gone, or when nobody touched it while we watched (a job killed on another host). Only times of the
file system are compared, so the hosts' clocks need not agree.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from megatron.checkpoint import layout
from megatron.errors import UserError
from megatron.log import get_logger

logger = get_logger(__name__)


class SaveLock:
    """Holds the right to write in a `save` folder. Use on one rank (rank 0), as a context manager or by hand.

    Args:
        root: the `save` folder (created).
        heartbeat: seconds between touches.
        patience: seconds without a touch after which another host's lock is taken over.
    """

    def __init__(self, root: str | Path, heartbeat: float = 10.0, patience: float = 45.0) -> None:
        self.path = Path(root) / layout.LOCK
        self.heartbeat = heartbeat
        self.patience = patience
        self.token = uuid.uuid4().hex
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock; waits up to `patience` seconds to see whether another's is alive.

        Raises `UserError` naming host and process that hold it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while not self._create():
            holder = self._read()
            if holder is None:
                continue  # released in between
            if self._is_alive(holder):
                raise UserError(_describe_holder(self.path, holder))
            self._remove(holder)
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="save-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lock back; does nothing when it is not ours any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self.held():
                self.path.unlink(missing_ok=True)

    def held(self) -> bool:
        """Whether the lock on disk is ours (another job may have taken it over while this process was suspended)."""
        return (self._read() or {}).get("token") == self.token

    def __enter__(self) -> SaveLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _create(self) -> bool:
        """Create the lock file; False when there is one."""
        content = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "token": self.token,
        }
        try:
            with open(self.path, "x", encoding="utf-8") as file:
                file.write(json.dumps(content))
        except FileExistsError:
            return False
        return True

    def _read(self) -> dict[str, Any] | None:
        return _parse(self.path)

    def _is_alive(self, holder: dict[str, Any]) -> bool:
        if holder.get("host") == socket.gethostname() and isinstance(holder.get("pid"), int):
            return _process_runs(holder["pid"], holder.get("started"))
        before = self._last_touch()
        logger.info(f"{self.path} is held by {holder.get('host')}; watching for {self.patience:.0f} s if it is alive")
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self.patience / 10))
            if self._last_touch() != before:
                return self._read() is not None
        return False

    def _last_touch(self) -> int | None:
        try:
            with open(self.path, "rb") as file:  # opening asks a network server again, stat may not
                return os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def _remove(self, holder: dict[str, Any]) -> None:
        """Remove the stale lock of `holder`, and no other: two jobs may come to the same conclusion at once."""
        aside = self.path.with_name(f".{layout.LOCK}.stale.{self.token}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if (_parse(aside) or {}).get("token") != holder.get("token"):
            with suppress(FileExistsError):
                os.link(aside, self.path)
            aside.unlink()
            return
        aside.unlink()
        logger.warning(f"took over the lock of process {holder.get('pid')} on {holder.get('host')}, which is gone")

    def _beat(self) -> None:
        while not self._stop.wait(self.heartbeat):
            try:
                if not self.held():
                    logger.warning(f"{self.path} is no longer this job's: another job took it over")
                    return
                os.utime(self.path)
            except OSError as error:  # a network file system may fail for a moment; the next beat tries again
                logger.warning(f"{self.path} could not be touched: {error}")


def refuse_if_held(root: str | Path) -> None:
    """Raise the `UserError` of `acquire` when a process of this host holds the lock in `root`. Changes nothing.

    Another host's lock would have to be watched for a while, so that is left to `acquire`.
    """
    path = Path(root) / layout.LOCK
    holder = _parse(path)
    if holder and holder.get("host") == socket.gethostname() and isinstance(holder.get("pid"), int):
        if _process_runs(holder["pid"], holder.get("started")):
            raise UserError(_describe_holder(path, holder))


def _describe_holder(path: Path, holder: dict[str, Any]) -> str:
    return (
        f"{path.parent} is being written by another job: process {holder.get('pid')} on {holder.get('host')}, since "
        f"{holder.get('since')}. Wait for it, or choose another `save`. (If you are sure it is gone, delete {path}.)"
    )


def _parse(path: Path) -> dict[str, Any] | None:
    """Content of a lock file; None when there is no file, empty when it makes no sense."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}  # being written at this moment, or damaged: its heartbeat decides
    return content if isinstance(content, dict) else {}


def _process_runs(pid: int, started: float | None) -> bool:
    """Whether that very process runs on this host (process ids are used again, so its start time must agree)."""
    try:
        running = psutil.Process(pid)
        return started is None or abs(running.create_time() - started) < 1.0
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
