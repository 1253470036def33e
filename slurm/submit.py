#!/usr/bin/env python
"""Submit a training job to the first cluster that has idle nodes: python slurm/submit.py -c CONFIG -e EXPERIMENT."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.errors import run_cli
from megatron.jobs import submit
from megatron.jobs.submit import parser

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Submit as the command line says."""
    return submit.main(sys.argv[1:] if argv is None else argv, os.environ)


if __name__ == "__main__":
    run_cli(main)
