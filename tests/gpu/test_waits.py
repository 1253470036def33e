"""On a GPU no step waits for the device: torch refuses everything that would, from the fourth step of a run on.

DEEPY_GPU_TESTS_ON=cpu tries the run, where there is nothing to refuse; tests/training/test_host_waits.py counts there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_training import EXPERTS, PACKED, STEPS, Run
from tests.training.runs import corpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

WATCHED = STEPS - 3
STRICT = f'''
"""A callback that has torch refuse to wait, from one step's batch to the end of the next one's callbacks."""

import torch

from megatron.callbacks import CALLBACKS
from megatron.training.callback import Callback


@CALLBACKS.register("strict", phase="finish")
class Strict(Callback):
    watched = 0

    def _refuse(self, trainer, mode):
        if trainer.state.device.type == "cuda":
            torch.cuda.set_sync_debug_mode(mode)

    def before_step(self, trainer):
        if trainer.step >= {STEPS - WATCHED}:
            self._refuse(trainer, "error")

    def after_step(self, trainer, out):
        self.watched += trainer.step > {STEPS - WATCHED}
        trainer.metrics["strict/watched"] = self.watched
        self._refuse(trainer, "default")

    def error(self, trainer, error):
        self._refuse(trainer, "default")
'''
CASES: dict[str, dict[str, Any]] = {
    "packed": PACKED,
    "packed, native": {**PACKED, "engine": "native"},
    "fp32, native": {"precision": "fp32", "engine": "native"},
    "fp32": {"precision": "fp32"},
    "accumulated": {"train_micro_batch_size_per_gpu": 2},
    "experts": {**EXPERTS, **PACKED, "moe_capacity_factor": 1.0},
}


@pytest.mark.parametrize("name", CASES)
def test_no_step_waits_for_the_device(tmp_path: Path, device: str, name: str) -> None:
    corpus(tmp_path)
    plugin = tmp_path / "strict.py"
    plugin.write_text(STRICT)
    keys = {
        "precision": "bfloat16",
        "plugins": [str(plugin)],
        "callbacks": {"strict": True},
        "checkpoint_factor": 100,
        **CASES[name],
    }
    run = Run(tmp_path, "run", device, **keys).wait()
    rows = [json.loads(line) for line in (run.save / "metrics.jsonl").read_text().splitlines()]
    # What a step adds to the log is in the next one's.
    assert [row["strict/watched"] for row in rows if "strict/watched" in row][-1] == WATCHED - 1
