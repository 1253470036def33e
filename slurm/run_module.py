"""Run a module of this Deepy: python slurm/run_module.py MODULE [ARGUMENT ...], from any folder.

`python -m` would import a `megatron` that lies in the folder it is started in, such as another clone's.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # instead of this folder
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
