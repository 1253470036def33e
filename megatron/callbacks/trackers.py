"""Where metrics go besides the console: metrics.jsonl, TensorBoard, Weights & Biases. One interface, same names."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, Protocol

from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.training.callback import Callback
from megatron.training.trainer import Trainer


class Tracker(Protocol):
    """A place to write numbers to."""

    def write(self, metrics: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl` of the run folder: one object a line with `step`, `time` and the metrics. Appended to.

    Strict JSON, which knows no NaN or infinity: such a value is null.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, metrics: dict[str, float], step: int) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), **numbers}, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """`tensorboard_dir`."""

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "tensorboard_dir is set: pip install -r requirements/requirements-tensorboard.txt"
            ) from error
        self._writer = SummaryWriter(log_dir=directory)

    def write(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """`use_wandb`: one run per job, or one per rank in a common group with `wandb_init_all_ranks`.

    `WANDB_MODE=offline` works as everywhere; `wandb_host` is only passed on when set, so that WANDB_BASE_URL does too.
    """

    def __init__(self, args: NeoXArgs, directory: str | None, rank: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("use_wandb is set: pip install -r requirements/requirements-wandb.txt") from error
        log = args.logging
        group, name = log.wandb_group, log.wandb_run_name
        if log.wandb_init_all_ranks:
            group, name = group or name or "ranks", f"{name or 'rank'}-{rank}"
        host = {"base_url": log.wandb_host} if args.is_set("wandb_host") else {}
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=log.wandb_project,
                group=group,
                name=name,
                entity=log.wandb_team,
                config=args.to_dict(),
                dir=directory,
                resume="allow",
                settings=wandb.Settings(**host),
            )
        except wandb.errors.Error as error:  # no key, a wrong one, no way to the server
            raise UserError(f"use_wandb: {error} (WANDB_MODE=offline needs neither a key nor a network)") from error

    def write(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers(Callback):
    """Hands every logged and evaluated metric to each tracker."""

    def __init__(self, trackers: list[Any]) -> None:
        self.trackers = trackers

    def logged(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        self._write(metrics, step)

    def evaluated(self, trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
        self._write({f"{split}/{name}": value for name, value in metrics.items()}, trainer.step)

    def _write(self, metrics: dict[str, float], step: int) -> None:
        for tracker in self.trackers:
            tracker.write(metrics, step)

    def end(self, trainer: Trainer) -> None:
        self._close()

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        trackers, self.trackers = self.trackers, []
        for tracker in trackers:
            tracker.close()
