"""The file with the resolved config: private, removed at the end, and by the next launcher after a kill."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cluster.config_file import config_file

pytestmark = pytest.mark.cpu

WAIT = """
import sys
from pathlib import Path
from megatron.cluster.config_file import config_file
with config_file("{}", Path(sys.argv[1])) as path:
    print(path, flush=True)
    sys.stdin.read()
"""


def start(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a file, and its file."""
    command = [sys.executable, "-c", WAIT, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_killed_launcher_s_file_is_removed_by_the_next_one(tmp_path: Path) -> None:
    running, kept = start(tmp_path)
    killed, left = start(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    elsewhere = tmp_path / left.name.replace(f"-{socket.gethostname()}.", f"-{socket.gethostname()}-2.")
    elsewhere.write_text("{}")
    here = os.stat("/proc/self/ns/pid").st_ino
    container = tmp_path / left.name.replace(f".{here}.", f".{here + 1}.")
    container.write_text("{}")
    assert container != left and left.exists() and kept.exists() and elsewhere != left
    with config_file("text", tmp_path) as mine:
        assert sorted(tmp_path.iterdir()) == sorted([kept, elsewhere, container, mine]) and mine.read_text() == "text"
        assert stat.S_IMODE(os.stat(mine).st_mode) == 0o600
    running.communicate("")
    assert sorted(tmp_path.iterdir()) == sorted([elsewhere, container])
