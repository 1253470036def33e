"""Stop signals before a run has anything to save, sent to processes that are importing, waiting or working."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]
# Where the process is: inside an import whose errors somebody catches; blocked in C; working in Python with a lock.
PLACES = {
    "import": "try:\n    while True: time.sleep(0.01)\nexcept BaseException: pass",
    "rendezvous": "BLOCK",
    "setup": "starting.allow(30.0)\ntry:\n    while True: time.sleep(0.01)\nfinally: open('released', 'w').close()",
    "stuck": "starting.allow(0.5)\nBLOCK",
    "training": "starting.allow(5.0)\nlose_at_stop()\nBLOCK",
    "forks": """\
codes, context = [], multiprocessing.get_context("fork")
for grace in (0.0, 5.0):
    if grace: starting.allow(grace)
    with context.Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    child = context.Process(target=time.sleep, args=(60,), daemon=True)
    child.start(); time.sleep(0.3); child.terminate(); child.join(5)
    codes.append(child.exitcode)
open('codes', 'w').write(str(codes))
time.sleep(0.3)""",
    "complete": "starting.allow(5.0)\ngive_back(handle_stop_signals(print), complete=True)\n"
    "while not os.path.exists('end'): time.sleep(0.01)",
}
# A mutex locked twice: the main thread waits in C for ever, without the interpreter's lock.
BLOCK = "mutex = ctypes.create_string_buffer(64)\nfor _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(mutex)"
SCRIPT = """
import ctypes, multiprocessing, os, time
from megatron.errors import run_cli
from megatron.signals import ExitAtStop, give_back, handle_stop_signals, lose_at_stop

def main():
    starting = ExitAtStop()
    open('up', 'w').close()
{place}

run_cli(main, is_run=True)
"""


def start(folder: Path, place: str, *prefix: str) -> subprocess.Popen[str]:
    lines = [f"    {line}" for line in PLACES[place].replace("BLOCK", BLOCK).splitlines()]
    (folder / "work.py").write_text(SCRIPT.format(place="\n".join(lines)))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*prefix, sys.executable, "work.py"],
        cwd=folder,
        env=env,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the suite may run under nohup
    )
    deadline = time.monotonic() + 30
    while not (folder / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.1)
    return process


@pytest.mark.parametrize("place", ["import", "rendezvous", "setup", "stuck"])
def test_a_process_that_is_starting_stops_at_once_with_code_3(tmp_path: Path, place: str) -> None:
    for number in SIGNALS if place == "import" else [signal.SIGTERM]:
        (tmp_path / "up").unlink(missing_ok=True)
        process = start(tmp_path, place)
        process.send_signal(number)
        _, err = process.communicate(timeout=10)
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        assert process.returncode == 3 and name in err and "newest checkpoint" in err and "Traceback" not in err
    assert (tmp_path / "released").exists() == (place == "setup")


def test_nohup_ignores_a_closed_terminal(tmp_path: Path) -> None:
    process = start(tmp_path, "import", "nohup")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.terminate()
    assert process.wait(timeout=10) == 3


def test_a_process_prints_its_stacks_and_continues(tmp_path: Path) -> None:
    process = start(tmp_path, "setup")
    process.send_signal(signal.SIGURG)
    time.sleep(0.3)
    process.terminate()
    _, err = process.communicate(timeout=10)
    assert process.returncode == 3 and 'work.py", line' in err and "in main" in err


def test_a_killed_launcher_that_read_the_output_keeps_no_rank_alive(tmp_path: Path) -> None:
    process = start(tmp_path, "rendezvous")
    assert process.stderr is not None
    process.stderr.close()
    process.terminate()
    try:
        assert process.wait(timeout=10) == 3
    finally:
        process.kill()


def test_a_run_that_saves_nothing_at_a_signal_does_not_say_that_it_did(tmp_path: Path) -> None:
    process = start(tmp_path, "training")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM and "SIGTERM" in err and "Traceback" not in err


def test_a_complete_run_ends_as_such(tmp_path: Path) -> None:
    process = start(tmp_path, "complete")
    for number in SIGNALS:
        process.send_signal(number)
    time.sleep(0.3)
    (tmp_path / "end").touch()
    assert process.communicate(timeout=10)[1] == "" and process.returncode == 0


def test_forked_processes_are_ended_alone(tmp_path: Path) -> None:
    """As lm-evaluation-harness ends those that compute the errors of a perplexity."""
    process = start(tmp_path, "forks")
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert (tmp_path / "codes").read_text() == f"{[-signal.SIGTERM] * 2}"
