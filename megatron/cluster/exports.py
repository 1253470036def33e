"""Hugging Face folders of a run's checkpoints, made by a process beside the run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.cluster.evaluation_jobs import environment_of_evaluation
from megatron.home import HOME

TOOL = HOME / "tools" / "ckpts" / "convert_neox_to_hf.py"


@dataclass(frozen=True)
class Exports:
    """Where they are: `<folder>/global_step<N>`, each complete and checked or not there, and `<folder>/export.log`.

    Args:
        root: the `save` folder of the run.
        averaged: the moving averages of the weights (`ema_decay`) are exported in their place.
    """

    root: Path
    folder: Path
    averaged: bool = False

    @property
    def log(self) -> Path:
        """What the processes printed."""
        return self.folder / "export.log"

    def of(self, step: int) -> Path:
        """The folder of a step's export."""
        return self.folder / f"global_step{step}"

    def steps(self) -> list[int]:
        """Those that are complete, in order."""
        found = (path.parent.name.removeprefix("global_step") for path in self.folder.glob("global_step*/config.json"))
        return sorted(int(number) for number in found if number.isdigit())

    def start(self, step: int) -> subprocess.Popen[bytes]:
        """Begin to export a complete checkpoint. Raises `OSError`."""
        given = ["--input_dir", str(self.root / f"global_step{step}"), "--output_dir", str(self.of(step))]
        given += ["--overwrite"]  # that of a checkpoint which a run that went back has replaced
        return start_beside([str(TOOL), *given, *(["--ema"] if self.averaged else [])], self.log)


def start_beside(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a Python program beside the run, on CPUs at the lowest priority; what it prints is added to `log`.

    It belongs to this process's group, so that what ends a job ends it, too. Raises `OSError`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {**environment_of_evaluation(os.environ, of_slurm=False), "CUDA_VISIBLE_DEVICES": ""}
    with log.open("ab") as file:
        return subprocess.Popen(
            ["nice", "-n", "19", sys.executable, "-u", *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def last_words(log: Path) -> str:
    """The last line of a log, which says why a process failed."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
