#!/usr/bin/env python
"""Watch runs and jobs, wait for one, or see who uses the cluster. See --help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # instead of this folder

from megatron.errors import run_cli
from megatron.monitor import cli
from megatron.monitor.cli import parser

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Show what the command line asks for."""
    return cli.main(sys.argv[1:] if argv is None else argv, os.environ)


if __name__ == "__main__":
    run_cli(main)
