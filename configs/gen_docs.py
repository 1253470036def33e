"""`make docs` under the name that it has in GPT-NeoX: writes documentation/CONFIG_ARGUMENTS.md and DIFFERENCES.md."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    runpy.run_module("megatron.neox_arguments.docs", run_name="__main__")
