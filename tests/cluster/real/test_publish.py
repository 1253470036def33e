"""Ten checkpoints are published on a busy Hub by a command that is killed, and a download brings all of them."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hub.published_run import log_in, write_run
from tests.hub.upload_server import TOKEN, UploadHub
from tests.tools.command import ROOT

pytestmark = pytest.mark.timeout(240)

STEPS = tuple(range(1, 11))
COMMAND = ["bash", str(ROOT / "huggingface/batch_submit_checkpoints.sh")]
QUICKLY = ["--max-retries=5", "--retry-min-wait=0.1", "--retry-max-wait=0.5"]


@pytest.fixture(autouse=True)
def _idle_afterwards() -> None:
    """In place of that of the other modules: nothing here needs SLURM."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a machine without SLURM: only these programs are found."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "readlink"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    (programs / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python3").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "SLURM_", "DEEPY_"))}
    return {**kept, "PATH": str(programs), "OMP_NUM_THREADS": "1"}


def start(run: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Publish all checkpoints of `run`; a process group of its own."""
    return subprocess.Popen(
        [*COMMAND, str(run), "lab", *QUICKLY],
        cwd=run.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(reached: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Until it is so, while `process` runs."""
    until = time.monotonic() + 100
    while not reached():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.02)


def hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_ten_checkpoints_arrive_through_faults_and_a_kill(tmp_path, environment, monkeypatch):
    from huggingface_hub import snapshot_download

    run = write_run(tmp_path / "runs" / "tiny", steps=STEPS)
    checkpoints = hashes(run)
    with UploadHub() as hub:
        environment |= hub.environment(tmp_path / "home")
        hub.fail("repos/create", status=429, headers={"Retry-After": "1"})
        hub.fail("/refs", how="cut")
        hub.fail("/branch/global_step9", status=503)
        hub.fail("/commit/global_step9", status=412)
        hub.fail("/commit/global_step8", how="lose")
        hub.fail("/commit/global_step7", status=429, headers={"ratelimit": '"api";r=0;t=1'})
        hub.fail("/commit/global_step6", how="cut")
        first = start(run, environment)
        wait_for(lambda: hub.count("models/lab/tiny/commit/global_step6") > 1, first)
        hub.fail("PUT /_lfs/", how="hold")
        wait_for(lambda: hub.held, first)
        os.killpg(first.pid, signal.SIGKILL)
        said, _ = first.communicate()
        wait_for(lambda: not hub.active)

        hub.fail("PUT /_lfs/", how="cut", bytes=1000)
        hub.fail("/commit/global_step2", status=503, times=2)
        hub.fail("/commit/global_step1", how="lose")
        sent, there = hub.sent_large(), set(hub.large)
        again = start(run, environment)
        more, _ = again.communicate(timeout=150)
        assert again.returncode == 0, more
        new = sum(len(content) for oid, content in hub.large.items() if oid not in there)
        assert new <= hub.sent_large() - sent < new + 20_000  # but for what came before the cut
        assert TOKEN not in said + more and "0123456789abcdef" not in said + more

        assert all(hub.models[repo].private for repo in ("lab/tiny", "lab/neox-ckpt-tiny"))
        log_in(hub, tmp_path, monkeypatch)
        for step in STEPS:
            name = f"global_step{step}"
            for repo in ("lab/tiny", "lab/neox-ckpt-tiny"):
                assert hub.models[repo].titles(name) == [f"Upload {name}", "initial commit"]
                snapshot_download(repo, revision=name, local_dir=tmp_path / repo / name, max_workers=1)
                drop_cache(tmp_path / repo / name)
            assert hashes(tmp_path / "lab/tiny" / name) == hashes(tmp_path / f"runs/hf_checkpoints/tiny/{name}")
            raw = hashes(tmp_path / "lab/neox-ckpt-tiny" / name)
            weights = {f: h for f, h in hashes(run / name).items() if f.endswith((".safetensors", ".pt"))}
            assert weights and weights.items() <= raw.items()
        main = hub.models["lab/tiny"].branches["main"]
        assert main == hub.models["lab/tiny"].branches["global_step10"]
    assert hashes(run) == checkpoints


def drop_cache(folder: Path) -> None:
    """What the client notes about a download."""
    for path in sorted((folder / ".cache").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
