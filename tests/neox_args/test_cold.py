"""Loading and checking a config in a fresh interpreter: no torch, no deepspeed, well under half a second."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]

CODE = """
import resource, sys
before = resource.getrusage(resource.RUSAGE_SELF)
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.differences import differences_for
args = derive(NeoXArgs.from_files(["configs/20B.yml", "configs/local_setup.yml"], ["train_iters=100"]))
args = derive(args, Facts(vocab_size=50277))
differences_for(args), args.describe(50277), args.hash()
after = resource.getrusage(resource.RUSAGE_SELF)
heavy = {"torch", "deepspeed", "numpy", "transformers", "pydantic"} & set(sys.modules)
print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, sorted(heavy))
"""


def test_loading_is_light() -> None:
    """CPU time, not wall time: the machine may be busy."""
    runs = []
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
        seconds, heavy = result.stdout.split(maxsplit=1)
        assert heavy.strip() == "[]"
        runs.append(float(seconds))
    assert min(runs) < 0.5
