"""What a rank sets before torch is imported, where torch can say that it took effect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from megatron.cluster.rank import prepare_rank
prepare_rank()
import torch
held = torch.ones(1 << 26, device="cuda")
print([segment["is_expandable"] for segment in torch.cuda.memory_snapshot()])
"""


@pytest.mark.parametrize(("asked", "grows"), [({}, True), ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, False)])
def test_memory_of_a_rank_grows_in_place_unless_the_user_has_settings(asked: dict[str, str], grows: bool) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    env = {**inherited, "PYTHONPATH": str(ROOT), **asked}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == f"[{grows}]", done.stderr
