"""A process that owns the daemons of a test bed and ends all of them, and whatever they started, with the test run.

It is a child subreaper: a daemon's process that loses its parent (slurmstepd, the ranks of a job) becomes its child.
Its stdin is a pipe that only the test run holds. When that closes, be it by a SIGKILL of the test run, it kills
everything below it and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


class Keeper:
    """The test run's side: `with Keeper() as keeper: keeper.start([...], environment, log)`."""

    def __enter__(self) -> Keeper:
        command = [sys.executable, "-I", __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        return self

    def start(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Start a program that stays in the foreground, its output appended to `log`; returns its process id."""
        request = {"argv": list(argv), "environment": dict(environment), "log": str(log)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer.strip().isdigit():
            raise RuntimeError(f"{argv[0]} could not be started: {answer.strip()}")
        return int(answer)

    def __exit__(self, *exception: object) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def find_descendants(root: int) -> list[int]:
    """Process ids of all that descends from `root`, zombies left out."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(folder.name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, _reap)
    started = []  # a Popen object that is thrown away would be waited for by the next one
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                with open(request["log"], "ab") as log:
                    started.append(
                        subprocess.Popen(
                            request["argv"],
                            env=request["environment"],
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                        )
                    )
                print(started[-1].pid, flush=True)
            except OSError as error:
                print(error, flush=True)
    finally:
        while below := find_descendants(os.getpid()):
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


if __name__ == "__main__":
    _main()
