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
from typing import TYPE_CHECKING, Any

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.errors import DeepyError
from megatron.neox_arguments import NeoXArgs
from megatron.training.callback import Callback

if TYPE_CHECKING:
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


def write_status(
    folder: Path, *, state: str, step: int, train_iters: int | None, reason: str | None = None, code: int | None = None
) -> float:
    """Replace `status.json`. Returns the heartbeat written."""
    heartbeat = time.time()
    status: dict[str, Any] = {
        "version": STATUS_VERSION,
        "state": state,
        "step": step,
        "train_iters": train_iters,
        "heartbeat": heartbeat,
        "reason": reason,
        "exit_code": code,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    write_atomically(folder / "status.json", json.dumps(status, indent=2) + "\n")
    return heartbeat


def read_heartbeat(folder: Path) -> float | None:
    """The heartbeat in `status.json`, None when there is none to read."""
    try:
        return json.loads((folder / "status.json").read_text(encoding="utf-8")).get("heartbeat")
    except (OSError, ValueError):
        return None


@CALLBACKS.register(
    "run_status",
    phase="finish",
    idle={"save": None, "log_dir": None},
    required_by=("save", "log_dir"),
    loses="other tools read in status.json whether the run lives and how it ended",
)
class RunStatus(Callback):
    """Keeps `status.json` and `resolved.yml` (rank 0).

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last = 0.0

    @classmethod
    def build(cls, context: RunContext) -> RunStatus | None:
        return cls(context.folder) if context.folder is not None and context.state.rank == 0 else None

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
        from megatron.callbacks.stop_on_signal import STOP_BY_SIGNAL

        code = 0
        if trainer.stop_reason == STOP_BY_SIGNAL:
            code = 3 if trainer.saved_step == trainer.step else 1
        self._write(trainer, "ended", trainer.stop_reason or "train_iters reached", code)

    def evaluated(self, trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
        self._write(trainer, "running")

    def saved(self, trainer: Trainer, path: str) -> None:
        self._write(trainer, "running")

    def error(self, trainer: Trainer, error: BaseException) -> None:
        code = error.exit_code if isinstance(error, DeepyError) else 1
        self._write(trainer, "failed", f"{type(error).__name__}: {error}", code)

    def _write(self, trainer: Trainer, state: str, reason: str | None = None, exit_code: int | None = None) -> None:
        self._last = time.monotonic()
        total = trainer.args.training.train_iters
        write_status(self.folder, state=state, step=trainer.step, train_iters=total, reason=reason, code=exit_code)
