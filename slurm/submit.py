#!/usr/bin/env python
"""Submit a training job to the first cluster that has idle nodes: python slurm/submit.py -c CONFIG -e EXPERIMENT."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.errors import run_cli
from megatron.jobs.submit import main

if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:], os.environ))
