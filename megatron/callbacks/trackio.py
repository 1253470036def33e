"""Metrics in Trackio: a database and a dashboard on this machine, without an account."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.tracker import Tracker
from megatron.cluster.tracker_id import tracker_id
from megatron.errors import UserError
from megatron.home import installs
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs

logger = get_logger(__name__)


@CALLBACKS.register(
    "trackio", phase="report", idle={"use_trackio": False}, keys=("trackio_project", "trackio_run_name")
)
class Trackio(Tracker):
    """Writes metrics, the configuration and texts to Trackio, one run per run folder (rank 0); `trackio show` is the
    dashboard. `TRACKIO_DIR` works as everywhere.

    Steps that are trained again are not stored again: Trackio would show both.
    """

    keeps_first = True

    def __init__(self, args: NeoXArgs, directory: Path | None) -> None:
        try:
            import trackio
        except ImportError as error:
            raise UserError(f"use_trackio is set: {installs('trackio')}") from error
        log = args.logging
        run_id = tracker_id(directory, "trackio")
        # Trackio knows runs by their names.
        parts = [log.trackio_run_name or (directory.name if directory else None), run_id and run_id[:8]]
        name = "-".join(part for part in parts if part) or None
        # What is left out: usage of the machine, and a page inside a notebook.
        off = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        try:
            self._run = trackio.init(log.trackio_project, name, config=args.to_dict(), resume="allow", **off)
        except (ValueError, OSError) as error:
            raise UserError(f"use_trackio: {error}") from error
        self._table = trackio.Table
        self.stored = -1 if self._run._initial_last_step is None else self._run._initial_last_step
        if self.stored >= 0:
            logger.info(f"Trackio has steps up to {self.stored} of this run; those trained again are not stored again")

    @classmethod
    def build(cls, context: RunContext) -> Trackio | None:
        return cls(context.args, context.folder) if context.state.rank == 0 else None

    def write(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def write_texts(self, texts: Sequence[tuple[str, str]], step: int) -> None:
        table = self._table(columns=["prompt", "text"], data=[list(pair) for pair in texts])
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()
