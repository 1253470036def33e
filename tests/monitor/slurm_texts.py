"""Stand-ins for SLURM's commands: they print what those of 22.05 printed for jobs in each state (`slurm/*.txt`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

RECORDED = Path(__file__).parent / "slurm"  # fields end in ; here, in U+001F from the commands
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def install(folder: Path, texts: Mapping[str, str] | None = None, *, broken: bool = False) -> None:
    """Make programs in `folder`: each prints its text, or fails as SLURM's do when the controller is away."""
    found = {path.stem: path.read_text() for path in RECORDED.glob("*.txt")}
    folder.mkdir(exist_ok=True)
    for name, text in {**found, **(texts or {})}.items():
        body = f"printf %s {shlex.quote(text.replace(';', chr(31)))}"
        if broken:
            body = f"echo {shlex.quote(AWAY)} >&2; exit 1"
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
