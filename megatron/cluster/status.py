"""The run folder, and `status.json` in it, which other tools read: whether a run is alive, and how it ended."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.errors import LostRankError, StopRequested, UserError, exit_code_of
from megatron.files import read_json, write_atomically
from megatron.log import Once, get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.training.progress import SLOW_SECONDS

logger = get_logger(__name__)

STATUS_VERSION = 1


def run_folder(args: NeoXArgs) -> Path | None:
    """Where this run keeps its files; None when it neither saves nor logs to a directory."""
    chosen = args.checkpoint.save or args.logging.log_dir
    return Path(chosen) if chosen else None


def stop_limits(values: Mapping[str, Any]) -> dict[str, Any]:
    """How long a `LocalJob` waits for ranks that were asked to stop: until the run shows no progress for a while.

    That is as long as a checkpoint may take (`status.json` does not change while one waits for others or the disk);
    a hung step is ended by the ranks' own watchdog long before. `values`: those of the configuration, by key.
    """
    folder, seconds = values["save"] or values["log_dir"], values["watchdog_seconds"]
    limits: dict[str, Any] = {"sign_of_life": StatusFile(Path(folder)).path} if folder else {}
    # The ranks' own watchdog comes first, and a run shows its progress every few seconds only.
    return {**limits, "patience": max(seconds, SLOW_SECONDS) + 10.0} if seconds > 0 else limits


def slurm_job() -> dict[str, Any]:
    """The SLURM job that this process belongs to, as `status.json` names it: `job_id` (None outside of one), and how
    often SLURM restarted it."""
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    return {"job_id": os.environ.get("SLURM_JOB_ID"), "restart": int(count) if count.isdigit() else 0}


class StatusFile:
    """`status.json` of a run folder. `state` is one of starting, running, ended, failed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "status.json"
        self._started = time.time()
        self._first_step: int | None = None
        self._once = Once(logger)

    def write(
        self,
        state: str,
        step: int,
        train_iters: int | None,
        reason: str | None = None,
        code: int | None = None,
        stop_seconds: float | None = None,
        start_step: int | None = None,
        activity: str | None = None,
    ) -> dict[str, Any]:
        """Replace the file; returns what it holds now.

        Args:
            stop_seconds: what a stop takes, checkpoint included.
            start_step: where this start of the run began; None as long as nothing is loaded.
            activity: what it is doing (`Progress.activity`).
        """
        job = slurm_job()
        if self._first_step is None:  # a job that SLURM restarts keeps where it began
            before = self.read() or {}
            same = job["job_id"] is not None and before.get("job_id") == job["job_id"]
            self._first_step = before.get("first_step") if same else None
            self._first_step = start_step if self._first_step is None else self._first_step
        status = {
            "version": STATUS_VERSION,
            "state": state,
            "step": step,
            "train_iters": train_iters,
            "heartbeat": time.time(),
            "reason": reason,
            "exit_code": code,
            "stop_seconds": None if stop_seconds is None else round(stop_seconds, 1),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self._started,
            "start_step": start_step,
            "first_step": self._first_step,
            "activity": activity,
            "experiment": os.environ.get("DEEPY_EXPERIMENT") or None,
            **job,
        }
        self._replace(status)
        return status

    def write_failure(self, error: BaseException, step: int, train_iters: int | None) -> None:
        """The run ends with this error, which is no failure when it is a request to stop.

        A lost rank that another rank has named already stays named.
        """
        code, found = exit_code_of(error), self.read() or {}
        if code == LostRankError.exit_code == found.get("exit_code"):
            return
        state = "ended" if code == StopRequested.exit_code else "failed"
        start_step = found.get("start_step") if found.get("pid") == os.getpid() else None
        self.write(state, step, train_iters, f"{type(error).__name__}: {error}", code, start_step=start_step)

    def update(self, status: dict[str, Any], **fields: Any) -> None:
        """Replace fields of a status that was read; the heartbeat stays that of the run."""
        self._replace({**status, **fields})

    def read(self, since: float = 0.0) -> dict[str, Any] | None:
        """The status, if it was written after `since` (seconds since the epoch) and is whole."""
        try:
            return read_json(self.path) if self.path.stat().st_mtime >= since else None
        except (OSError, UserError):
            return None

    def has_failed(self) -> bool:
        """Whether another rank, or the launcher, has noted that this start of the run failed."""
        found = self.read() or {}
        return found.get("state") == "failed" and found.get("started") == self._started

    def read_own(self, since: float) -> dict[str, Any] | None:
        """The status, if this start of the run has written it, which began at `since`: the same run may be started
        twice, and the other start's heartbeat is as fresh."""
        status, job = self.read(since) or {}, slurm_job()
        if job["job_id"] is not None and status.get("job_id") is not None:
            own = all(status.get(key) == value for key, value in job.items())
        else:
            own = status.get("started", since) >= since  # not in the file of an older Deepy: as fresh as it is
        return status if own and status else None

    def _replace(self, status: dict[str, Any]) -> None:
        """Never ends a run: on a full disk the text goes into the file that is there, which needs no new block."""
        text = json.dumps(status, indent=2) + "\n"
        try:
            write_atomically(self.path, text)
        except OSError:
            try:
                with self.path.open("r+", encoding="utf-8") as file:
                    file.write(text)
                    file.truncate()
            except OSError as error:
                self._once.warning(f"{self.path} cannot be written: {error}")
