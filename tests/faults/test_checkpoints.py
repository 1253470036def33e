"""Known faults of saving (35), from the command line: a disk that fills up, and a process that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.checkpoint.find import list_checkpoints
from tests.faults.commands import CONFIG, ROOT, deepy, environment, make_folder

pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.timeout(300)]

RUN = ("save=ckpt", "checkpoint_factor=2", "num_gpus=2")
LARGER = CONFIG.replace("hidden_size: 16", "hidden_size: 64")  # the embedding alone takes 128 KiB


def test_a_full_disk_ends_every_rank_and_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """No file may grow beyond 64 KiB from the second start on, as if the disk were full."""
    make_folder(tmp_path, LARGER)
    assert deepy(tmp_path, *RUN, "train_iters=4", "exit_interval=2", timeout=110).returncode == 0
    command = ["prlimit", f"--fsize={1 << 16}", sys.executable, str(ROOT / "deepy.py"), str(ROOT / "train.py")]
    started = time.monotonic()
    done = subprocess.run(
        [*command, "run.yml", *RUN, "train_iters=4"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 6, done.stderr
    assert "Traceback" not in done.stderr
    message = re.search(r"^NoRoomError: the checkpoint of step 4 was not saved: .*", done.stderr, re.MULTILINE)
    assert message is not None, done.stderr
    assert re.search(r"It needs \d+ bytes; \d+ bytes are free .*Complete checkpoints there: \[2\]", message[0])
    assert time.monotonic() - started < 90
    left = list_checkpoints(tmp_path / "ckpt")
    assert (left.steps, left.latest, left.incomplete) == ((2,), 2, {})
    status = json.loads((tmp_path / "ckpt/status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 6, 4)
    again = deepy(tmp_path, *RUN, "train_iters=4", timeout=110)
    assert again.returncode == 0 and "resuming from ckpt/global_step2 at step 2" in again.stderr
    assert list_checkpoints(tmp_path / "ckpt").latest == 4


def test_a_job_killed_while_saving_resumes_from_the_previous_checkpoint(tmp_path: Path) -> None:
    """kill -9 of a rank between two files of its checkpoint: the job ends, the half-written folder does not count."""
    make_folder(tmp_path)
    (tmp_path / "train.py").write_text(
        "import os, signal\n"
        "from megatron.checkpoint.folder import CheckpointFolder\n"
        "from megatron.errors import run_cli\n"
        "from train_of_deepy import main\n"
        "publish = CheckpointFolder.publish\n"
        "def killed(self, manifest):\n"
        "    if self.step == 4:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return publish(self, manifest)\n"
        "CheckpointFolder.publish = killed\n"
        "run_cli(main)\n"
    )
    (tmp_path / "train_of_deepy.py").write_text((ROOT / "train.py").read_text(encoding="utf-8"), encoding="utf-8")
    done = deepy(tmp_path, *RUN, "train_iters=6", script=str(tmp_path / "train.py"), timeout=110)
    assert done.returncode == 5, done.stderr  # a rank was lost
    assert signal.SIGKILL.name in done.stderr or "signal 9" in done.stderr
    assert any(name.startswith(".") and "global_step4" in name for name in os.listdir(tmp_path / "ckpt"))
    assert list_checkpoints(tmp_path / "ckpt").steps == (2,)
    again = deepy(tmp_path, *RUN, "train_iters=6", timeout=110)
    assert again.returncode == 0 and "resuming from ckpt/global_step2 at step 2" in again.stderr
    left = list_checkpoints(tmp_path / "ckpt")
    assert (left.steps, left.incomplete) == ((2, 4, 6), {})
