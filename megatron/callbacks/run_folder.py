"""The run folder: what other tools read about a run instead of parsing its console.

    <folder>/resolved.yml    every key with its resolved value
    <folder>/status.json     {"version", "state", "step", "train_iters", "heartbeat", "reason", "exit_code", "pid",
                              "host"}
    <folder>/metrics.jsonl   one object per log and evaluation (callbacks/trackers)
    <folder>/logs/           output of the ranks (written by the launcher)

`state` is one of starting, running, ended, failed. The folder is `save`, or `log_dir` when nothing is saved.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from megatron.errors import DeepyError
from megatron.neox_arguments import NeoXArgs
from megatron.training.callback import Callback
from megatron.training.engine import StepOut
from megatron.training.trainer import Trainer

STATUS_VERSION = 1
# Seconds between heartbeats: fine enough for a watchdog, too rare to load a shared file system.
HEARTBEAT_SECONDS = 5.0


def run_folder(args: NeoXArgs) -> Path | None:
    """Where this run keeps its files; None when it neither saves nor logs to a directory."""
    chosen = args.checkpoint.save or args.logging.log_dir
    return Path(chosen) if chosen else None


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


class RunStatus(Callback):
    """Keeps `status.json` and `resolved.yml` (rank 0).

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last = 0.0

    def start(self, trainer: Trainer) -> None:
        import yaml

        self.folder.mkdir(parents=True, exist_ok=True)
        resolved = yaml.safe_dump(trainer.args.to_dict(), sort_keys=True)
        write_atomically(self.folder / "resolved.yml", resolved)
        self._write(trainer, "starting")

    def loaded(self, trainer: Trainer) -> None:
        self._write(trainer, "running")

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if time.monotonic() - self._last >= HEARTBEAT_SECONDS:
            self._write(trainer, "running")

    def end(self, trainer: Trainer) -> None:
        from megatron.callbacks.stopping import STOP_BY_SIGNAL

        stopped = trainer.stop_reason == STOP_BY_SIGNAL
        self._write(trainer, "ended", trainer.stop_reason or "train_iters reached", 3 if stopped else 0)

    def error(self, trainer: Trainer, error: BaseException) -> None:
        code = error.exit_code if isinstance(error, DeepyError) else 1
        self._write(trainer, "failed", f"{type(error).__name__}: {error}", code)

    def _write(self, trainer: Trainer, state: str, reason: str | None = None, exit_code: int | None = None) -> None:
        self._last = time.monotonic()
        status: dict[str, Any] = {
            "version": STATUS_VERSION,
            "state": state,
            "step": trainer.step,
            "train_iters": trainer.args.training.train_iters,
            "heartbeat": time.time(),
            "reason": reason,
            "exit_code": exit_code,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        write_atomically(self.folder / "status.json", json.dumps(status, indent=2) + "\n")
