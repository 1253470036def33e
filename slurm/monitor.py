#!/usr/bin/env python
"""Watch runs and jobs, wait for one, or see who uses the cluster. See --help."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # instead of this folder
    from megatron.errors import run_cli
    from megatron.monitor.cli import main

    run_cli(lambda: main(sys.argv[1:], os.environ))
