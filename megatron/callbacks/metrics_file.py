"""`metrics.jsonl` of the run folder."""

from __future__ import annotations

import contextlib
import json
import math
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

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
