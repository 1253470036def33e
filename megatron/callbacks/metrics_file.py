"""`metrics.jsonl` of the run folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.tracker import Tracker
from megatron.log import Once, get_logger

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

_START = re.compile(r'\{"step": (\d+), .*"start": true\}')


@CALLBACKS.register(
    "metrics_file", phase="report", idle={"save": None, "log_dir": None}, loses="metrics.jsonl is not written"
)
class MetricsFile(Tracker):
    """Appends to `metrics.jsonl` in `save` or `log_dir`: one object a line with `step`, `time` and the metrics.

    A start that continues from a checkpoint is a line with `start` and no metrics: what was logged of later steps
    before is trained again.

    Strict JSON, which knows no NaN or infinity: such a value is null.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._once = Once(logger)
        if _is_torn(path):
            self._file.write("\n")

    @classmethod
    def build(cls, context: RunContext) -> MetricsFile | None:
        if context.folder is None or context.state.rank != 0:
            return None
        return cls(context.folder / "metrics.jsonl")

    def loaded(self, trainer: Trainer) -> None:
        if trainer.step or self.newest > 0:
            self._append({"step": trainer.step, "time": time.time(), "start": True})

    def write(self, metrics: dict[str, float], step: int) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._append({"step": step, "time": time.time(), **numbers})

    def _append(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:  # a full disk: metrics are no reason to end a run
            self._once.warning(f"{self._file.name} cannot be written: {error}")

    def holds(self, metrics: dict[str, float], step: int) -> bool:
        """Whether a line of this step has one of the metrics, and no start from an earlier step follows it. Reads the
        file."""
        of_step, found = f'{{"step": {step}, ', False
        with open(self._file.name, encoding="utf-8") as lines:
            for line in lines:
                if (start := _START.match(line)) is not None:
                    found = found and int(start[1]) >= step
                elif line.startswith(of_step) and any(f'"{name}":' in line for name in metrics):
                    found = True
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _is_torn(path: Path) -> bool:
    """Whether who wrote the file before was killed inside its last line."""
    with path.open("rb") as file:
        return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
