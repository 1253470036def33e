"""`metrics.jsonl` of the run folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from pathlib import Path

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.tracker import Tracker
from megatron.log import Once, get_logger

logger = get_logger(__name__)


@CALLBACKS.register(
    "metrics_file", phase="report", idle={"save": None, "log_dir": None}, loses="metrics.jsonl is not written"
)
class MetricsFile(Tracker):
    """Appends to `metrics.jsonl` in `save` or `log_dir`: one object a line with `step`, `time` and the metrics.

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

    def write(self, metrics: dict[str, float], step: int) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        try:
            self._file.write(json.dumps({"step": step, "time": time.time(), **numbers}, allow_nan=False) + "\n")
        except OSError as error:  # a full disk: metrics are no reason to end a run
            self._once.warning(f"{self._file.name} cannot be written: {error}")

    def holds(self, metrics: dict[str, float], step: int) -> bool:
        """Whether a line of this step has one of the metrics. Reads the file."""
        start = f'{{"step": {step}, '
        with open(self._file.name, encoding="utf-8") as lines:
            return any(line.startswith(start) and any(f'"{name}":' in line for name in metrics) for line in lines)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _is_torn(path: Path) -> bool:
    """Whether who wrote the file before was killed inside its last line."""
    with path.open("rb") as file:
        return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
