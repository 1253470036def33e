"""The test's side: start the fork server once, send it one call, turn its files into results or one readable error."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STARTUP_SECONDS = 180  # importing torch and DeepSpeed takes 4 s on an idle machine, far longer on a crowded one
OUTPUT_LINES = 40


class RankFailure(AssertionError):
    """A rank raised, died or hung. The message shows every rank's traceback, stack and output, the first to fail first.

    `exceptions` maps rank to the exception it raised, where that could be pickled.
    """

    def __init__(self, message: str, exceptions: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.exceptions = exceptions


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, backend: str | None = "gloo"
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in `world_size` processes and return their results, in rank order.

    `fn` is a function at the top level of an importable module (or a `functools.partial` of one); arguments and results
    are pickled. Each rank starts from the same seed, in the caller's folder, with the caller's environment plus
    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_*; torch.distributed is initialised with `backend`
    (None: it is left alone, and MASTER_PORT is free). What ranks print is passed on to the test's stdout.

    Raises `RankFailure` when a rank raises, dies, or is still running after `timeout` seconds.
    """
    module, name = _name_of(fn)
    with tempfile.TemporaryDirectory(prefix="deepy-ranks-") as folder:
        Path(folder, "call.pkl").write_bytes(pickle.dumps((fn, args)))
        request = {
            "folder": folder,
            "module": module,
            "world_size": world_size,
            "timeout": timeout,
            "backend": backend,
            "path": sys.path,
            "cwd": os.getcwd(),
            "environment": dict(os.environ),
        }
        reply = _SERVER.call(request, STARTUP_SECONDS + timeout + 30)
        if "error" in reply:
            raise RankFailure(f"run_distributed({module}.{name}): {reply['error']}", {})
        return _collect(f"run_distributed({module}.{name}, world_size={world_size})", reply, Path(folder), timeout)


def _name_of(fn: Callable[..., Any]) -> tuple[str, str]:
    """Module and qualified name of `fn`; refuses what another process cannot import."""
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    module, name = getattr(inner, "__module__", None), getattr(inner, "__qualname__", repr(inner))
    if not module or module == "__main__" or "<" in name:
        raise TypeError(f"run_distributed needs a function at the top level of an importable module, not {inner!r}")
    return module, name


def _collect(call: str, reply: dict[str, Any], folder: Path, timeout: float) -> list[Any]:
    """Results in rank order, or the `RankFailure` that tells what happened to whom."""
    ranks: list[dict[str, Any]] = reply["ranks"]
    outcomes = [_load(folder / f"rank_{rank}.result") for rank in range(len(ranks))]
    outputs = [_tail(folder / f"rank_{rank}.output") for rank in range(len(ranks))]
    if all(status["state"] == "ok" for status in ranks):
        for rank, output in enumerate(outputs):
            if output:
                print(f"[rank {rank}] " + output.replace("\n", f"\n[rank {rank}] "))
        return [outcome["value"] for outcome in outcomes]

    headline, sections, exceptions = "", [], {}
    for rank in reply["order"]:
        status, outcome = ranks[rank], outcomes[rank]
        if status["state"] == "error":
            what, text = f"raised {outcome['summary']}", outcome["traceback"]
            if outcome["exception"] is not None:
                with contextlib.suppress(Exception):
                    exceptions[rank] = pickle.loads(outcome["exception"])
        elif status["state"] == "hung":
            what = f"was still running after {timeout:g} s" if reply["timed_out"] else "was waiting for the others"
            text = _tail(folder / f"rank_{rank}.stacks", lines=200)
        elif status["state"] == "ok":
            what, text = "had finished", ""
        else:
            what, text = f"died ({_exit_text(status['exit'])})", _tail(folder / f"rank_{rank}.stacks", lines=200)
        headline = headline or f"rank {rank} {what}"
        sections.append(f"----- rank {rank} {what}\n{text}".rstrip())
        if outputs[rank] and status["state"] != "ok":
            sections.append(f"----- rank {rank}: its last output\n{outputs[rank]}")
    raise RankFailure("\n".join([f"{call}: {headline}", *sections]), exceptions)


def _exit_text(code: int | None) -> str:
    if code is None:
        return "no exit code"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _load(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _tail(path: Path, lines: int = OUTPUT_LINES) -> str:
    text = path.read_text(errors="replace").rstrip() if path.exists() else ""
    return "\n".join(text.splitlines()[-lines:])


class ServerHandle:
    """The fork server of this test session: started on first use, shared by children forked later, gone with us.

    The server watches a pipe whose writing end only the test session holds: however the session ends, the pipe closes,
    and the server kills its ranks and leaves.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lifeline = -1
        self._folder = ""

    def start(self) -> None:
        """Start the server if there is none. Returns at once: it imports while the session goes on."""
        if self._running():
            return
        self.stop()
        self._owner = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="deepy-server-")
        read_end, self._lifeline = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener, open(f"{self._folder}/log", "wb") as log:
            listener.bind(f"{self._folder}/socket")  # bound here, so that calls may queue up before it is ready
            listener.listen(16)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.server", str(listener.fileno()), str(read_end)],
                cwd=ROOT,
                env=_server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(listener.fileno(), read_end),
            )
        os.close(read_end)
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the server, from the process that started it."""
        if self._process is None or self._owner != os.getpid():
            return
        os.close(self._lifeline)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.stop)

    def call(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        """Send one request and wait for its reply. Leaving early (an exception) makes the server kill the ranks."""
        self.start()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(patience)
            try:
                connection.connect(f"{self._folder}/socket")
                connection.sendall(json.dumps(request).encode() + b"\n")
                reply = connection.makefile("rb").readline()
            except TimeoutError:
                reply = b""
            if not reply:
                raise RankFailure(f"the fork server gave no answer; its log:\n{_tail(Path(self._folder, 'log'))}", {})
            return json.loads(reply)

    def _running(self) -> bool:
        if self._process is None:
            return False
        if self._owner != os.getpid():  # a child forked from the session (pytest --forked), which owns the server
            return True
        return self._process.poll() is None


def _server_environment() -> dict[str, str]:
    """One thread per library, so that the server has a single thread when it forks; CPU; quiet."""
    threads = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "RAYON")
    return {
        **os.environ,
        **{f"{name}_NUM_THREADS": "1" for name in threads},
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",  # where there is a GPU, importing DeepSpeed would start its driver's threads
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
    }


def start_server() -> None:
    """Start the server ahead of the first call (for `pytest --forked`, whose tests run in children of the session)."""
    _SERVER.start()


def stop_server() -> None:
    """Stop the server, if this process started it. The next call starts another."""
    _SERVER.stop()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll `condition` until it holds or `seconds` have passed; whether it held."""
    deadline = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return held


_SERVER = ServerHandle()
