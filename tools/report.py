#!/usr/bin/env python
"""One HTML page about runs, which opens without a network. See --help."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.errors import run_cli
from megatron.monitor.report_cli import main, parser

__all__ = ["main", "parser"]

if __name__ == "__main__":
    run_cli(main)
