"""The run folder: what other tools read about a run instead of parsing its console.

    <folder>/resolved.yml    every key with its resolved value, and what differs from GPT-NeoX
    <folder>/status.json     {"version", "state", "step", "train_iters", "heartbeat", "reason", "exit_code",
                              "stop_seconds", "pid", "host", "started", "start_step", "first_step", "activity",
                              "experiment", "job_id", "restart"}
    <folder>/metrics.jsonl   one object per log and evaluation (callbacks/metrics_file)
    <folder>/logs/           output of the ranks (written by the launcher)

`state` is one of starting, running, ended, failed. The folder is `save`, or `log_dir` when nothing is saved.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.cluster.status import StatusFile
from megatron.files import write_atomically
from megatron.neox_arguments.differences import differences_for
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer

# Seconds between heartbeats: fine enough for a watchdog, too rare to load a shared file system.
HEARTBEAT_SECONDS = 5.0


@CALLBACKS.register(
    "run_status",
    phase="finish",
    idle={"save": None, "log_dir": None},
    loses="status.json is not written, so other tools cannot see how the run ended",
)
class RunStatus(Callback):
    """Writes `status.json` and `resolved.yml` into `save`, or into `log_dir` when nothing is saved (rank 0).

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = StatusFile(folder)
        self._last, self._ended = 0.0, False
        self._start_step: int | None = None
        self._activity = ""

    @classmethod
    def build(cls, context: RunContext) -> RunStatus | None:
        return cls(context.folder) if context.folder is not None and context.state.rank == 0 else None

    def start(self, trainer: Trainer) -> None:
        import yaml

        self.folder.mkdir(parents=True, exist_ok=True)
        resolved = yaml.safe_dump(trainer.args.to_dict(), sort_keys=True)
        lines = [f"# {line}" for line in ("differences from GPT-NeoX for this config:", *differences_for(trainer.args))]
        write_atomically(self.folder / "resolved.yml", "\n".join([*lines, resolved]))
        self._write(trainer, "starting")

    def loaded(self, trainer: Trainer) -> None:
        self._start_step = trainer.step
        self._write(trainer, "running")
        trainer.progress.listeners.append(lambda: self._heartbeat(trainer))

    def _heartbeat(self, trainer: Trainer) -> None:
        due = time.monotonic() - self._last >= HEARTBEAT_SECONDS or self._activity != trainer.progress.activity
        if not self._ended and due:
            self._write(trainer, "running")

    def end(self, trainer: Trainer) -> None:
        self._ended = True
        code = trainer.stop_code if trainer.saved_step == trainer.step else min(trainer.stop_code, 1)
        self._write(trainer, "ended", trainer.stop_reason or "train_iters reached", code)

    def evaluated(self, trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
        self._write(trainer, "running")

    def saved(self, trainer: Trainer, path: str) -> None:
        self._write(trainer, "running")

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._ended = True
        if self._last:  # else what was there before the start is still true, and `setup_status` adds why it failed
            self._file.write_failure(error, trainer.step, trainer.args.training.train_iters)

    def _write(self, trainer: Trainer, state: str, reason: str | None = None, exit_code: int | None = None) -> None:
        self._last, self._activity = time.monotonic(), trainer.progress.activity
        if state == "running" and self._file.has_failed():
            return  # another rank has ended the job, because this one did not answer
        train_iters = trainer.args.training.train_iters
        self._file.write(
            state,
            trainer.step,
            train_iters,
            reason,
            exit_code,
            trainer.progress.stop_seconds,
            self._start_step,
            self._activity if state == "running" else None,
        )
