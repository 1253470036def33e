"""A `python` for commands in documents: each runs in a process of its own, forked where the imports are done already.

The server imports torch, DeepSpeed and transformers (seconds each), nothing of Deepy, and forks one process per
command. What stands for `python` (and starts its ranks) is a small client that hands over its arguments, folder,
environment and streams, waits, and ends with the same code. A registry that is filled by another test's imports is
empty here, as in a user's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
text = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(text).to_bytes(8, "big")], [0, 1, 2])
server.sendall(text)
sys.exit(int(server.makefile("rb").readline() or 70))
"""
DEEPY = f"""#!/bin/sh
exec python -c 'import sys; sys.path.insert(0, "{Path(__file__).resolve().parents[1]}")
from megatron.commands.cli import main
main()' "$@"
"""
TORCHRUN = '#!/bin/sh\nexec python -m torch.distributed.run "$@"\n'


class WarmPython:
    """A folder of programs for the front of PATH, and the server behind them."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder
        address = str(folder / "socket")
        client = CLIENT.format(python=sys.executable, address=address)
        for name, text in (("python", client), ("deepy", DEEPY), ("torchrun", TORCHRUN)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(100)
        command = [sys.executable, "-m", __name__, str(listener.fileno()), str(folder / "python")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        self.server = subprocess.Popen(command, pass_fds=[listener.fileno()], env=env, start_new_session=True)
        listener.close()

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)  # with every command that is left
        self.server.wait()

    def run(self, script: str, folder: Path, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        """Run lines of a shell in `folder`; they end with the first that fails."""
        outside = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "DLTS_HOSTFILE")
        inherited = {name: value for name, value in os.environ.items() if name not in outside}
        env = {**inherited, "DS_ACCELERATOR": "cpu", "PATH": f"{self.programs}:{os.environ['PATH']}", **env}
        command = ["bash", "-c", f"set -e -o pipefail\n{script}"]
        return subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )


def serve(listener: socket.socket) -> tuple[list[str], str, dict[str, str]]:
    """Fork for each connection; returns, in the process of a command, its arguments, folder and environment."""
    while True:
        connection, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork():
            connection.close()
            continue
        head, streams, _, _ = socket.recv_fds(connection, 8, 3)
        argv, folder, env = json.loads(connection.makefile("rb").read(int.from_bytes(head, "big")))
        if (command := os.fork()) == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            listener.close()
            connection.close()
            return argv, folder, env
        os._exit(_watch(connection, command))


def _watch(connection: socket.socket, command: int) -> int:
    """Hand the exit code to the client; when that is gone (it was killed), so is the command."""
    while True:
        pid, status = os.waitpid(command, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            connection.sendall(b"%d\n" % (code if code >= 0 else 128 - code))
            return 0
        if select.select([connection], [], [], 0.02)[0]:
            os.kill(command, signal.SIGKILL)
            return 0


def become(argv: list[str], folder: str, env: dict[str, str]) -> None:
    """Do what `python <argv>` does. Returns or raises as the program does."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, open(number, "w" if number else "r", buffering=1, closefd=False))  # noqa: SIM115
    arguments = argv[1:]
    while arguments and arguments[0] == "-u":
        del arguments[0]
    kind = arguments.pop(0)
    if kind == "-m":
        sys.argv = arguments
        sys.path[0] = folder
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.path[0] = ""
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [kind, *arguments]
        sys.path[0] = os.path.dirname(os.path.realpath(kind))
        runpy.run_path(kind, run_name="__main__")


def _forget_tests(path: list[str]) -> None:
    """As in a process that has imported nothing of this repository."""
    sys.path[:] = ["", *path]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]


def _main() -> tuple[Any, ...]:
    from tests.distributed.server import preload

    listener = socket.socket(fileno=int(sys.argv[1]))
    client = sys.argv[2]
    preload()
    import transformers.models.auto.modeling_auto
    import transformers.models.gpt_neox.modeling_gpt_neox  # noqa: F401

    assert not [name for name in sys.modules if name.partition(".")[0] == "megatron"]
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    request = serve(listener)
    sys.executable = client  # the ranks of a run are started by it
    return request


if __name__ == "__main__":
    own = [path for path in sys.path[1:] if not os.path.exists(os.path.join(path, "megatron"))]
    asked = _main()
    _forget_tests(own)
    become(*asked)
