"""Run folders and logs for the monitor, by the callbacks of a real run around an engine that does as it is told."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron import log
from megatron.callbacks import RunContext, build_callbacks
from megatron.cluster.status import StatusFile
from megatron.mpu.state import ParallelState
from megatron.training.callback import Callback
from megatron.training.engine import StepOut
from tests.callbacks.fakes import args_of, batches, trainer_of

KEYS = {"log_interval": 1, "train_iters": 10, "eval_iters": 2, "eval_interval": 5, "checkpoint_factor": 1000}
KEYS |= {"peak_theoretical_tflops": 0.01, "stop_on_signal": None}


class Snapshot(Callback):
    """Copies the small files of a run folder after step `at`: a run that is still there."""

    def __init__(self, run: Path, at: int, to: Path) -> None:
        self.run, self.at, self.to = run, at, to

    def after_step(self, trainer: Any, out: StepOut) -> None:
        if trainer.step == self.at:
            with trainer.progress.during("evaluation"):  # its end is a heartbeat
                self.to.mkdir(parents=True)
            for name in ("status.json", "metrics.jsonl"):
                shutil.copy2(self.run / name, self.to)


def train(
    folder: Path,
    *,
    at: int | None = None,
    to: Path | None = None,
    outs: Iterable[StepOut] = (),
    start: int = 0,
    **keys: Any,
) -> str:
    """Train in `folder`, copying it to `to` after step `at`; returns what the run printed."""
    keys = {name: value for name, value in {**KEYS, **keys, "save": str(folder)}.items() if value is not None}
    roles = {"valid": batches, "test": batches}
    callbacks = build_callbacks(RunContext(args_of(**keys), ParallelState.single("cpu"), 37, folder, roles))
    if at is not None and to is not None:
        callbacks.append(Snapshot(folder, at, to))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.out").open("w+") as file:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            log.configure()
            trainer = trainer_of(callbacks, outs, **keys)
            trainer.step = start
            trainer.run()
        file.seek(0)
        text = file.read()
    log.configure()
    return text


def change(folder: Path, *, age: float = 0.0, written: float | None = None, **fields: Any) -> None:
    """Change fields of `status.json`, its heartbeat `age` seconds old, the file `written` seconds (as old)."""
    file = StatusFile(folder)
    status = json.loads(file.path.read_text())
    now = time.time()
    if "start_step" in fields:
        fields = {"first_step": fields["start_step"], **fields}
    file.update(status, **{"heartbeat": now - age, **fields})
    os.utime(file.path, (now, now - (age if written is None else written)))
