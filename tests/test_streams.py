"""Commands whose output nobody reads: real pipes, a closed terminal and a full device, in processes of their own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
WORK = """
import sys
from megatron import log
from megatron.errors import run_cli
from megatron.signals import ExitAtStop

if IS_RUN:
    ExitAtStop()  # as deepy.py and train.py begin

def main():
    log.configure()
    for number in range(3000):
        print(f"line {number} of the result")
        log.get_logger("x").info(f"message {number}")
        print(f"message {number}", file=sys.stderr)
    open("done", "w").close()
    return CODE

run_cli(main, is_run=IS_RUN)
"""


def shell(folder: Path, redirection: str, *, is_run: bool, code: int = 0) -> tuple[list[int], str]:
    """Exit codes of the parts of `python work.py REDIRECTION`, and what the shell shows of it."""
    (folder / "work.py").write_text(WORK.replace("IS_RUN", str(is_run)).replace("CODE", str(code)))
    line = f'{sys.executable} work.py {redirection}; echo "${{PIPESTATUS[@]}}" > codes'
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    return [int(word) for word in (folder / "codes").read_text().split()], done.stdout + done.stderr


@pytest.mark.parametrize(
    "redirection",
    [
        "2>/dev/null | head -1",
        "2>&1 | head -1",
        "2>&1 >/dev/null | head -1",
        ">&- 2>&-",
        "> /dev/null 2>&-",
        "> /dev/full 2>&1",
    ],
)
def test_a_run_needs_no_reader(tmp_path: Path, redirection: str) -> None:
    codes, shown = shell(tmp_path, redirection, is_run=True, code=3)
    assert codes[0] == 3 and (tmp_path / "done").exists()
    assert len(shown.splitlines()) <= 1 and sorted(os.listdir(tmp_path)) == ["codes", "done", "work.py"]


def test_a_run_outlives_its_terminal(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK.replace("IS_RUN", "True").replace("CODE", "3"))
    controller, terminal = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "work.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    os.close(controller)  # writes fail with EIO from now on
    assert process.wait(timeout=60) == 3 and (tmp_path / "done").exists()


def test_a_run_that_loses_the_peer_of_a_socket_shows_where(tmp_path: Path) -> None:
    lines = "import socket\none, other = socket.socketpair()\nother.close()\none.sendall(b'metrics')\n"
    work = WORK.replace("    log.configure()\n", "".join(f"    {line}\n" for line in lines.splitlines()), 1)
    (tmp_path / "work.py").write_text(work.replace("IS_RUN", "True").replace("CODE", "0"))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "work.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "in main" in done.stderr and "BrokenPipeError" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        ("ValueError('boom')", 1, "ValueError: boom"),
        ("LostRankError('rank 1 is gone')", 5, "LostRankError: rank 1 is gone"),
        ("KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_a_run_that_fails_is_gone_at_once_and_has_said_all(tmp_path: Path, error: str, code: int, last: str) -> None:
    """What waits for others at the end of a process, as a device's library does, is not waited for."""
    lines = "import atexit, threading, time\natexit.register(time.sleep, 60)\n"
    lines += "threading.Thread(target=time.sleep, args=(60,)).start()\nprint('the last result', end='')\n"
    lines += f"from megatron.errors import LostRankError\nraise {error}\n"
    work = WORK.replace("    open(", "".join(f"    {line}\n" for line in lines.splitlines()) + "    open(")
    (tmp_path / "work.py").write_text(work.replace("IS_RUN", "True"))
    env, began = {**os.environ, "PYTHONPATH": str(ROOT)}, time.monotonic()
    command = [sys.executable, "work.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == code and time.monotonic() - began < 30
    assert done.stdout.endswith("line 2999 of the result\nthe last result")
    errors = done.stderr.splitlines()
    assert errors[-1] == last and "message 2999" in errors and ("in main" in done.stderr) == (code == 1)


def test_a_run_that_succeeds_is_gone_before_a_thread_that_is_left_can_abort_it(tmp_path: Path) -> None:
    """What was registered for its end is done; a live thread in C++ cannot end the process in the tear-down."""
    code = """
import atexit, threading, time
from megatron.errors import run_cli
atexit.register(print, "said at the end")
threading.Thread(target=time.sleep, args=(60,)).start()
run_cli(lambda: print("done"), is_run=True)
"""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\nsaid at the end\n"), done.stderr
    assert time.monotonic() - began < 30


def test_a_tool_ends_with_its_reader_and_silently(tmp_path: Path) -> None:
    codes, shown = shell(tmp_path, "2>/dev/null | head -1", is_run=False)
    assert codes == [141, 0] and shown == "line 0 of the result\n"
    codes, shown = shell(tmp_path, "2>&1 >/dev/null | head -1", is_run=False)  # its messages are not its result
    assert codes == [0, 0] and len(shown.splitlines()) == 1


def test_a_tool_that_prints_less_than_a_buffer_ends_so_too() -> None:
    command = f"{sys.executable} tools/ckpts/inspect_checkpoints.py --help"
    line = f"{command} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.stdout in ("0\n", "141\n")  # 0: it was done before `true` had ended


def test_a_result_on_a_full_disk_is_one_message_and_the_machine_s_fault(tmp_path: Path) -> None:
    codes, shown = shell(tmp_path, "> /dev/full 2> err", is_run=False)
    errors = (tmp_path / "err").read_text().splitlines()
    assert codes == [6] and shown == "" and "No space left on device" in errors[-1]
