"""What happens inside one forked rank: environment, process group, the test's function, its result on disk."""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

KEPT = ("OMP_NUM_THREADS", "DS_ACCELERATOR", "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_COMPILE_THREADS")
LOCALS_CHARACTERS = 300


def run_rank(rank: int, request: dict[str, Any], listener: socket.socket, port: int, done: int, go: int) -> None:
    """Run the call as `rank`; never returns. Writes `rank_N.result`, one byte to `done`, and ends when `go` closes.

    `listener` listens on `port` of this machine, unless the process group is left to the function.
    """
    folder = Path(request["folder"])
    _own_streams(folder, rank)
    _set_environment(rank, request, port)
    try:
        store = _initialise(rank, request, listener, port)  # noqa: F841  (rank 0's store must live until all have finished)
        fn, args = pickle.loads((folder / "call.pkl").read_bytes())
        outcome = {"value": fn(rank, request["world_size"], *args)}
        (folder / f"rank_{rank}.result").write_bytes(pickle.dumps(outcome))
    except BaseException as error:
        (folder / f"rank_{rank}.result").write_bytes(pickle.dumps(_describe(error)))
        os.write(done, b"e")
        _leave(1)  # at once: closed sockets are what frees the ranks that wait for this one
    os.write(done, b"k")
    os.read(go, 1)  # stay until every rank is done, because rank 0 hosts the store and the others may still use it
    _leave(0)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _own_streams(folder: Path, rank: int) -> None:
    """Output goes to `rank_N.output`, stacks (on SIGUSR1 or a crash) to `rank_N.stacks`."""
    output = os.open(folder / f"rank_{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stacks = os.open(folder / f"rank_{rank}.stacks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)


def _set_environment(rank: int, request: dict[str, Any], port: int) -> None:
    """The caller's environment and folder, the variables a launcher sets, and one seed for everybody."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.update(kept)
    world_size = str(request["world_size"])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size,
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    if Path("/sys/class/net/lo").exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(request["cwd"])
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def _initialise(rank: int, request: dict[str, Any], listener: socket.socket, port: int) -> dist.TCPStore | None:
    """Join the process group through a store on the port that the server already holds: nobody can take it from us."""
    if request["backend"] is None:
        return None
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        request["world_size"],
        is_master=rank == 0,
        timeout=timedelta(seconds=request["timeout"] + 30),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if rank == 0 else None,
    )
    if rank != 0:
        listener.close()
    dist.init_process_group(
        request["backend"],
        store=store,
        rank=rank,
        world_size=request["world_size"],
        timeout=timedelta(seconds=request["timeout"] + 30),  # a hang is the server's to report, with everybody's stack
    )
    return store


def _describe(error: BaseException) -> dict[str, Any]:
    """Summary, traceback with the local variables of the innermost frame under tests/, the exception if it pickles."""
    lines = traceback.format_exception(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [f for f in frames if f"{os.sep}tests{os.sep}" in f.f_code.co_filename and f.f_code.co_filename != __file__]
    if ours:
        lines.append(f"local variables of {ours[-1].f_code.co_name}:\n")
        lines.extend(f"    {name} = {_short(value)}\n" for name, value in ours[-1].f_locals.items())
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = None
    summary = traceback.format_exception_only(error)[-1].strip()
    return {"summary": summary, "traceback": "".join(lines), "exception": pickled}


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<no repr: {type(error).__name__}>"
    return text if len(text) <= LOCALS_CHARACTERS else text[:LOCALS_CHARACTERS] + " ..."
