"""pretrain_neox.sbatch, run as SLURM would run it, with a stand-in for srun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

Submit = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]
SRUN = """#!/bin/sh
echo "srun $*"
echo "$MASTER_ADDR:$MASTER_PORT $PROFILE_WAS_READ"
exit 3
"""
CONFIG = """
num_layers: 2
hidden_size: 16
num_attention_heads: 2
seq_length: 8
train_micro_batch_size_per_gpu: 1
train_iters: 2
data_path: tokens
"""


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    (tmp_path / "bin").mkdir()
    (tmp_path / "slurm/profiles").mkdir(parents=True)
    (tmp_path / "slurm/profiles/here.sh").write_text("export PROFILE_WAS_READ=yes\n")
    for name, text in {"bin/srun": SRUN, "bin/python3": f'#!/bin/sh\nexec {sys.executable} "$@"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    shutil.copy(ROOT / "deepy.py", tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "run.yml").write_text(CONFIG)

    def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        slurm = {"SLURM_JOB_ID": "4007", "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": "8"}
        base = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")}
        base |= {"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        command = ["bash", str(ROOT / "pretrain_neox.sbatch"), *argv]
        return subprocess.run(
            command, env=base | slurm | {"PYTHONPATH": str(ROOT)} | env, capture_output=True, text=True, timeout=60
        )

    return run


def test_the_job_starts_one_rank_per_task_and_keeps_the_code(submit: Submit) -> None:
    done = submit("run.yml", "train_iters=5", DEEPY_PROFILE="here")
    first, second = done.stdout.splitlines()
    assert first.startswith("srun -n 8 --kill-on-bad-exit=1 --export=ALL ") and " -u train.py --resolved " in first
    assert second == "localhost:29507 yes"  # 29500 + 4007 % 1000
    assert done.returncode == 3, done.stderr  # saved and stopped: start again


def test_what_is_missing_is_reported(submit: Submit, tmp_path: Path) -> None:
    assert submit().returncode == 2
    done = submit("run.yml", DEEPY_PROFILE="elsewhere")
    assert done.returncode == 2 and "here.sh" in done.stderr
    done = submit("run.yml", SLURM_SUBMIT_DIR=str(tmp_path / "bin"))
    assert done.returncode == 2 and "deepy.py" in done.stderr
