"""The newest metrics as a text file for Prometheus."""

from __future__ import annotations

import math
import re
from pathlib import Path

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.tracker import Tracker
from megatron.files import write_atomically
from megatron.log import Once, get_logger

logger = get_logger(__name__)


@CALLBACKS.register("prometheus", phase="report", idle={"prometheus_file": None})
class Prometheus(Tracker):
    """Replaces `prometheus_file` at each log and evaluation (rank 0): a gauge for the newest value of each metric and
    one for the step, in Prometheus's text format. The textfile collector of node_exporter reads `*.prom` files."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self._once, self._values = path, Once(logger), {}
        self._label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        path.parent.mkdir(parents=True, exist_ok=True)

    @classmethod
    def build(cls, context: RunContext) -> Prometheus | None:
        log, folder = context.args.logging, context.folder
        name = log.wandb_run_name or (folder.name if folder else "deepy")
        return cls(Path(log.prometheus_file), name) if context.state.rank == 0 else None

    def write(self, metrics: dict[str, float], step: int) -> None:
        self.write_late(metrics | {"step": step}, step)

    def write_late(self, metrics: dict[str, float], step: int) -> None:
        self._values |= metrics
        text = ""
        for metric, value in sorted(self._values.items()):
            name = "deepy_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
            shown = repr(float(value)) if math.isfinite(value) else "NaN" if math.isnan(value) else f"{value:+}".title()
            text += f'# TYPE {name} gauge\n{name}{{run="{self._label}"}} {shown}\n'
        try:
            write_atomically(self.path, text)
        except OSError as error:  # a full disk: metrics are no reason to end a run
            self._once.warning(f"{self.path} cannot be written: {error}")
