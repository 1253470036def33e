"""Metrics in Comet."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.tracker import Tracker
from megatron.cluster.tracker_id import tracker_id
from megatron.errors import UserError
from megatron.home import installs
from megatron.neox_arguments import NeoXArgs


def _new_folder(parent: Path) -> Path:
    """A folder for this start: Comet names its archive by Python's random numbers, which the run's seed repeats."""
    return parent / f"{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}"


@CALLBACKS.register(
    "comet",
    phase="report",
    idle={"use_comet": False},
    keys=("comet_workspace", "comet_project", "comet_experiment_name", "comet_tags", "comet_others"),
)
class Comet(Tracker):
    """Writes metrics and the configuration to Comet, one experiment per run folder (rank 0).

    Comet's own variables work as everywhere: `COMET_API_KEY`, and `COMET_START_ONLINE=0` writes a file for each
    start into a folder in `comet/` of the run folder; `comet upload` sends them later.
    Steps that are trained again in the same start are not sent again: Comet would show both.
    """

    keeps_first = True

    def __init__(self, args: NeoXArgs, directory: Path | None) -> None:
        try:
            import comet_ml
        except ImportError as error:
            raise UserError(f"use_comet is set: {installs('comet')}") from error
        log = args.logging
        if directory is not None:
            (directory / "comet").mkdir(parents=True, exist_ok=True)  # Comet makes its folder in it
        try:
            self._experiment = comet_ml.start(
                workspace=log.comet_workspace,
                project=log.comet_project,
                experiment_key=tracker_id(directory, "comet", "COMET_EXPERIMENT_KEY"),
                experiment_config=comet_ml.ExperimentConfig(
                    # Only what the run logs: no copy of the console, nothing caught from torch or TensorBoard.
                    auto_output_logging=False,
                    auto_param_logging=False,
                    auto_metric_logging=False,
                    parse_args=False,
                    # The address of the remote may hold a password, a patch anything; git_hash is a parameter.
                    log_git_metadata=False,
                    log_git_patch=False,
                    display_summary_level=0,
                    offline_directory=None if directory is None else str(_new_folder(directory / "comet")),
                    name=log.comet_experiment_name,
                    tags=list(log.comet_tags or ()) or None,
                ),
            )
        except (ValueError, OSError, comet_ml.exceptions.CometException) as error:  # no key, a wrong one, no network
            raise UserError(f"use_comet: {error} (COMET_START_ONLINE=0 needs neither a key nor a network)") from error
        self._experiment.log_parameters(args.to_dict())
        if log.comet_others:
            self._experiment.log_others(log.comet_others)

    @classmethod
    def build(cls, context: RunContext) -> Comet | None:
        return cls(context.args, context.folder) if context.state.rank == 0 else None

    def write(self, metrics: dict[str, float], step: int) -> None:
        self._experiment.log_metrics(metrics, step=step)

    def write_texts(self, texts: Sequence[tuple[str, str]], step: int) -> None:
        for prompt, text in texts:
            self._experiment.log_text(prompt + text, step=step, metadata={"prompt": prompt})

    def close(self) -> None:
        self._experiment.end()
