"""A run on a GPU is the run on a CPU: same command, same losses."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.training.runs import KEYS, corpus

ROOT = Path(__file__).resolve().parents[2]
# relative, over six steps; bf16 on a CPU is 1e-4 away from fp32
TOLERANCE = {"fp32": 1e-5, "bfloat16": 2e-3}


def losses(folder: Path, name: str, device: str, **keys: object) -> list[float]:
    """Training losses of `deepy.py train.py` on one "cpu" or "cuda" device."""
    save = folder / name
    prefix = folder / "text_document"
    config = {**KEYS, "data_path": str(prefix), "save": str(save), "num_gpus": 1, "train_iters": 6, **keys}
    path = folder / f"{name}.yml"
    path.write_text(yaml.safe_dump(config))
    hidden = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
    done = subprocess.run(
        [sys.executable, "deepy.py", "train.py", str(path)],
        cwd=ROOT,
        env={**os.environ, **hidden},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ("no GPU" in done.stderr) == (device == "cpu"), done.stderr
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [row["train/lm_loss"] for row in rows if "train/lm_loss" in row]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], list[float]]:
    """Losses in fp32 on the CPU, without and with intra_document_masking, each run once."""

    @cache
    def run(masked: bool) -> list[float]:
        folder = tmp_path_factory.mktemp("on_cpu")
        corpus(folder)
        return losses(folder, "on_cpu", "cpu", precision="fp32", intra_document_masking=masked)

    return run


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("precision", list(TOLERANCE))
def test_same_losses_as_on_a_cpu(
    tmp_path: Path, precision: str, masked: bool, on_cpu: Callable[[bool], list[float]]
) -> None:
    corpus(tmp_path)
    on_gpu = losses(tmp_path, "on_gpu", "cuda", precision=precision, intra_document_masking=masked)
    assert len(on_gpu) == 6
    assert on_gpu == pytest.approx(on_cpu(masked), rel=TOLERANCE[precision])


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_profile_has_kernels_and_the_model_s_memory(tmp_path: Path) -> None:
    corpus(tmp_path)
    steps = {"profile_step_start": 2, "profile_step_stop": 4}
    losses(tmp_path, "profiled", "cuda", precision="bfloat16", profile=True, memory_profiling=True, **steps)
    folder = tmp_path / "profiled" / "profile"
    (trace,) = folder.glob("rank0.*.pt.trace.json")
    assert any(event.get("cat") == "kernel" for event in json.loads(trace.read_text())["traceEvents"])
    snapshot = pickle.loads((folder / "mem_snapshot_rank0.pickle").read_bytes())
    frames = [frame["name"] for events in snapshot["device_traces"] for one in events for frame in one["frames"]]
    assert "build_model" in frames and "train_batch" in frames


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_comparison_sees_a_difference(tmp_path: Path) -> None:
    """The same functions without a GPU: two runs agree, another precision does not pass for equal."""
    corpus(tmp_path)
    first = losses(tmp_path, "first", "cpu", precision="fp32")
    assert losses(tmp_path, "again", "cpu", precision="fp32") == first
    rounded = losses(tmp_path, "rounded", "cpu", precision="bfloat16")
    assert rounded == pytest.approx(first, rel=TOLERANCE["bfloat16"])
    assert rounded != pytest.approx(first, rel=TOLERANCE["fp32"])
