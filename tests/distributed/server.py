"""The fork server: imports torch and DeepSpeed once, then forks the ranks of one call at a time.

`python -m tests.distributed.server LISTENER_FD LIFELINE_FD`. It never runs a tensor operation, because a process
that has started threads cannot be forked safely. A request is one JSON line, the reply another; results are files.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

GRACE_SECONDS = 5  # after one rank has failed, how long the others may take to notice
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    lifeline = int(sys.argv[2])
    folder = os.path.dirname(listener.getsockname())
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a rank leaves behind becomes our child, and is swept away after the call
    preload()
    while True:
        ready, _, _ = select.select([listener, lifeline], [], [])
        if lifeline in ready:
            shutil.rmtree(folder, ignore_errors=True)
            return
        connection, _ = listener.accept()
        with connection:
            line = connection.makefile("rb").readline()
            if not line:
                continue
            reply = _answer(json.loads(line), connection, listener, lifeline)
            with contextlib.suppress(OSError):  # the test may have gone (its own timeout): nobody wants the answer
                connection.sendall(json.dumps(reply).encode() + b"\n")
        if _thread_count() > 1:
            os.execv(sys.executable, [sys.executable, "-m", "tests.distributed.server", *sys.argv[1:]])  # start afresh


def preload() -> None:
    """Import what ranks need. Dynamo and inductor are what deepspeed.initialize() would import lazily, for 7-30 s."""
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    import deepspeed
    import deepspeed.runtime.pipe.engine
    import deepspeed.runtime.zero.stage3
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch.distributed._functional_collectives
    import torch.utils.checkpoint

    import tests.distributed.rank  # noqa: F401

    # Else init_distributed compiles a C++ operator (minutes), and a killed build leaves a lock that hangs later runs.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()  # keeps the pages of imported modules shared with the ranks


def _answer(request: dict[str, Any], connection: socket.socket, listener: socket.socket, lifeline: int) -> dict:
    """Run one call. The reply holds each rank's state (ok, error, died, hung), exit code, and the order of failing."""
    try:
        sys.path[:] = request["path"]
        importlib.import_module(request["module"])
    except BaseException:
        return {"error": "importing the test's module failed:\n" + traceback.format_exc()}
    threads = _thread_count()
    if threads > 1:
        return {
            "error": f"importing {request['module']} started threads in the fork server ({threads} now run), so "
            "forking is no longer safe: move what starts them (a tensor operation, a pool) into the function"
        }
    ranks = Ranks(request, inherited=[connection, listener])
    try:
        return ranks.wait(request["timeout"], stop_on=[connection.fileno(), lifeline])
    finally:
        ranks.end()


def _thread_count() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Ranks:
    """The processes of one call."""

    def __init__(self, request: dict[str, Any], inherited: list[socket.socket]) -> None:
        from tests.distributed.rank import run_rank

        self.folder = Path(request["folder"])
        self.pids: list[int] = []
        self.state = ["running"] * request["world_size"]
        self.exit: list[int | None] = [None] * request["world_size"]
        self.order: list[int] = []
        self.done: dict[int, int] = {}  # file descriptor -> rank
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            port = holder.getsockname()[1]
            if request["backend"] is None:
                holder.close()  # a free port for the function to use; otherwise we hold it until rank 0 takes it over
            else:
                holder.listen(128)
            go_read, self.go = os.pipe()
            for rank in range(request["world_size"]):
                done_read, done_write = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.setsid()  # a group of its own, so that its children can be killed with it
                    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    for handle in inherited:
                        handle.close()
                    for descriptor in (self.go, done_read, *self.done):
                        os.close(descriptor)
                    run_rank(rank, request, holder, port, done_write, go_read)
                os.close(done_write)
                self.done[done_read] = rank
                self.pids.append(pid)
            os.close(go_read)

    def wait(self, timeout: float, stop_on: list[int]) -> dict[str, Any]:
        """Until all ranks have finished, or the time is up, or the test or session has gone (`stop_on` readable)."""
        deadline, timed_out = time.monotonic() + timeout, False
        while self.done:
            ready, _, _ = select.select([*self.done, *stop_on], [], [], max(0.0, deadline - time.monotonic()))
            if any(descriptor in ready for descriptor in stop_on):
                break
            if not ready:
                timed_out = not self.order
                self._dump_stacks()
                break
            for descriptor in ready:
                rank = self.done.pop(descriptor)
                self.state[rank] = {b"k": "ok", b"e": "error"}.get(os.read(descriptor, 1), "died")
                os.close(descriptor)
                if self.state[rank] != "ok":
                    self.order.append(rank)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        self.end()
        rest = sorted(set(range(len(self.state))) - set(self.order), key=lambda rank: (self.state[rank] == "ok", rank))
        ranks = [{"state": state, "exit": code} for state, code in zip(self.state, self.exit, strict=True)]
        return {"ranks": ranks, "order": self.order + rest, "timed_out": timed_out}

    def _dump_stacks(self) -> None:
        """Ask each unfinished rank for the Python stacks of its threads (faulthandler answers even inside C code)."""
        hung = sorted(self.done.values())
        for rank in hung:
            self.state[rank] = "hung"
            os.kill(self.pids[rank], signal.SIGUSR1)
        files = [self.folder / f"rank_{rank}.stacks" for rank in hung]
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not all(file.exists() and file.stat().st_size for file in files):
            time.sleep(0.02)
        time.sleep(0.2)  # the files are no longer empty; let the writers come to their last line

    def end(self) -> None:
        """Release or kill whatever still runs, and reap it."""
        if self.go < 0:
            return
        os.close(self.go)  # finished ranks are waiting for this
        self.go = -1
        for descriptor in self.done:
            os.close(descriptor)
        self.done = {}
        for rank, pid in enumerate(self.pids):
            deadline = time.monotonic() + (5 if self.state[rank] in ("ok", "error", "died") else 0)
            while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.002)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # its group outlives it if it left children
            self.exit[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _sweep()


def _sweep() -> None:
    """Kill and reap the descendants that finished ranks left behind."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    try:
        while os.waitpid(-1, 0)[0]:
            continue
    except ChildProcessError:
        return


if __name__ == "__main__":
    main()
