"""Run a module of this Deepy: python slurm/run_module.py MODULE [ARGUMENT ...], from any folder.

`python -m` would import a `megatron` that lies in the folder it is started in, such as another clone's.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec

# What a python3 that is not Deepy's may lack; what prepares or submits jobs needs less.
NEEDS = {"megatron.jobs.environment": ("yaml",), "megatron.jobs.publishing": ("yaml", "numpy")}
ALL = ("yaml", "numpy", "psutil", "torch", "deepspeed")

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # instead of this folder
    del sys.argv[0]
    if missing := [name for name in NEEDS.get(sys.argv[0], ALL) if find_spec(name) is None]:
        print(
            f"error: {sys.executable} lacks {', '.join(missing)}: "
            f"sbatch run_on_compute.sbatch bash setup_uv_env.sh makes {sys.path[0]}/.venv",
            file=sys.stderr,
        )
        sys.exit(2)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
