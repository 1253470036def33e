"""A lock in `save`: two jobs must not write the same checkpoints.

`lock.json` names host, process and a token; a thread touches it every few seconds. A lock is stale when its process on
this host is gone (a zombie is), or when nobody touched it while we watched (a job killed on another host, or in another
container). Only times of the file system are compared, so the hosts' clocks need not agree.

A job that is about to end is waited for: it was stopped, or its launcher was killed, and it saves.
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
from megatron.files import read_json, write_atomically
from megatron.log import get_logger

logger = get_logger(__name__)

SAVING_SECONDS = 600.0  # for a job that is ending: time to write the largest checkpoints
WATCH_SECONDS = 30.0  # for any other: it may have been asked to stop, and notes it in the lock after its step
_POLL_SECONDS = 0.2


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
        self._content = {
            "host": socket.gethostname(),
            "namespace": _namespace(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "token": self.token,
        }
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock; waits for a holder that is ending, and up to `patience` seconds to see whether one is alive.

        Raises `UserError` naming host and process that hold it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while not self._create():
            holder = _parse(self.path)
            if holder is None:
                continue  # released in between
            if self._is_alive(holder):
                _await_release(self.path, holder)
            else:
                self._remove(holder)
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="save-lock", daemon=True)
        self._thread.start()

    def announce_end(self, ending: bool = True) -> None:
        """Note in the lock whether the job ends after this step: the next one waits for its last checkpoint."""
        with suppress(OSError):  # a full disk is for the save to report
            if self.held():
                write_atomically(self.path, json.dumps({**self._content, "ending": ending}))

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
        return (_parse(self.path) or {}).get("token") == self.token

    def __enter__(self) -> SaveLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _create(self) -> bool:
        """Create the lock file; False when there is one."""
        try:
            with open(self.path, "x", encoding="utf-8") as file:
                file.write(json.dumps(self._content))
        except FileExistsError:
            return False
        return True

    def _is_alive(self, holder: dict[str, Any]) -> bool:
        if _is_here(holder):
            return _process_runs(holder)
        before = self._last_touch()
        logger.info(f"{self.path} is held by {holder.get('host')}; watching for {self.patience:.0f} s if it is alive")
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self.patience / 10))
            if self._last_touch() != before:
                return _parse(self.path) is not None
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


def refuse_if_held(root: str | Path, wait: bool = True) -> None:
    """Raise the `UserError` of `acquire` when a process of this host holds the lock in `root`. Changes nothing.

    Another host's lock would have to be watched for a while, so that is left to `acquire`. `wait`: for one that ends.
    """
    path = Path(root) / layout.LOCK
    holder = _parse(path)
    if holder and _is_here(holder) and _process_runs(holder):
        if not wait:
            raise UserError(_describe_holder(path, holder))
        _await_release(path, holder)


def is_held(root: str | Path, *, here: bool = False) -> bool:
    """Whether a process of this host holds the lock in `root`, or, unless `here`, one of another host may."""
    holder = _parse(Path(root) / layout.LOCK)
    if not holder:
        return False
    return _process_runs(holder) if _is_here(holder) else not here


def _await_release(path: Path, holder: dict[str, Any]) -> None:
    """Wait until `holder`, which is alive, has given the lock back. Raises `UserError` when it keeps it.

    Held by a job that announced its end for `SAVING_SECONDS`, by another for `WATCH_SECONDS`.
    """
    start = time.monotonic()
    whom, said = f"process {holder.get('pid')} on {holder.get('host')}", ""
    while (now := _parse(path)) is not None and now.get("token") == holder.get("token"):
        if _is_here(now) and not _process_runs(now):
            return
        ending = bool(now.get("ending"))
        waited, limit = time.monotonic() - start, SAVING_SECONDS if ending else WATCH_SECONDS
        if waited > limit:
            raise UserError(_describe_holder(path, holder))
        does = "is ending, its last checkpoint may not be complete" if ending else "is running"
        if does != said:
            logger.info(f"{path.parent} is written by {whom}, which {does}: waiting up to {limit:.0f} s for its end")
            said = does
        time.sleep(_POLL_SECONDS)
    logger.info(f"{path.parent}: {whom} has ended, after {time.monotonic() - start:.0f} s")


def _describe_holder(path: Path, holder: dict[str, Any]) -> str:
    return (
        f"{path.parent} is being written by another job: process {holder.get('pid')} on {holder.get('host')}, since "
        f"{holder.get('since')}. Wait for it, or choose another `save`. (If you are sure it is gone, delete {path}.)"
    )


def _parse(path: Path) -> dict[str, Any] | None:
    """Content of a lock file, without a process id or a time that makes no sense; None when there is no file.

    Empty when it is being written at this moment, or damaged: its heartbeat decides. Raises `UserError` for a folder.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder, so nobody can lock {path.parent}: remove it")
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UserError:
        return {}
    pid, started = content.get("pid"), content.get("started")
    if type(pid) is not int or not 0 < pid < 1 << 31:
        content.pop("pid", None)
    if type(started) not in (int, float):
        content.pop("started", None)
    return content


def _namespace() -> str:
    """Where process ids mean the same: this boot and this container; empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_here(holder: dict[str, Any]) -> bool:
    """Whether the process of a lock can be looked up here. Containers of one host may share its name."""
    same = holder.get("host") == socket.gethostname() and holder.get("namespace", _namespace()) == _namespace()
    return same and isinstance(holder.get("pid"), int)


def _process_runs(holder: dict[str, Any]) -> bool:
    """Whether that very process runs on this host: process ids are used again, so its start time must agree.

    A zombie does not run: it holds nothing but its exit code, until its parent asks for that.
    """
    try:
        process, started = psutil.Process(holder["pid"]), holder.get("started")
        if started is not None and abs(process.create_time() - started) >= 1.0:
            return False
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:  # ZombieProcess is one
        return False
    except psutil.AccessDenied:
        return True
