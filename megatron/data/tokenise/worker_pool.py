"""`ordered_map`: a function applied by worker processes, results in the order of the items.

Not `concurrent.futures`: its workers share one queue, and a worker killed at the wrong moment keeps that queue locked,
so the program waits forever (measured). Here every worker has its own pipe and one item at a time.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from megatron.errors import DeepyError

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD_PER_WORKER = 3  # results that may wait for an earlier one; more cost memory, fewer leave workers idle
PATIENCE = 5.0  # seconds a worker gets to end


@dataclass(frozen=True)
class _Failure:
    """An error in a worker: one written for the user, or the text of a traceback."""

    error: DeepyError | None
    text: str

    def reraise(self) -> None:
        raise self.error or RuntimeError(f"in a worker process:\n{self.text}")


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    item: int = -1  # number of the item it works on


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map(function, items)` on that many processes; `function`, items and results must pickle.

    Items are taken only a few ahead of the results. Raises what `function` raises for the first item that fails, and
    `DeepyError` when a worker dies. Closing the generator ends the workers.
    """
    # Forked workers share the memory of what the function holds; elsewhere it is sent to them.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool: list[_Worker] = []
    try:
        for _ in range(workers):
            pool.append(_start(context, function, [worker.connection for worker in pool]))
        yield from _run(pool, enumerate(items))
    finally:
        for worker in pool:
            worker.connection.close()  # an idle worker ends at this
            worker.process.terminate()
        for worker in pool:
            worker.process.join(PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()


def _run(pool: list[_Worker], items: Iterator[tuple[int, Any]]) -> Iterator[Any]:
    idle, busy = list(pool), dict[Connection, _Worker]()
    done: dict[int, Any] = {}
    wanted, exhausted = 0, False
    while True:
        while idle and not exhausted and len(done) < AHEAD_PER_WORKER * len(pool):
            taken = next(items, None)
            if taken is None:
                exhausted = True
                break
            worker = idle.pop()
            worker.item = taken[0]
            busy[worker.connection] = worker
            _send(worker, taken[1])
        if wanted in done:
            result = done.pop(wanted)
            wanted += 1
            if isinstance(result, _Failure):
                result.reraise()
            yield result
            continue  # there is room for another item again
        if not busy:
            return
        for connection in wait(list(busy)):
            worker = busy.pop(connection)  # type: ignore[call-overload]
            done[worker.item] = _receive(worker)
            idle.append(worker)


def _send(worker: _Worker, item: Any) -> None:
    try:
        worker.connection.send(item)
    except OSError as error:
        raise _lost(worker) from error


def _receive(worker: _Worker) -> Any:
    try:
        return worker.connection.recv()
    except (EOFError, OSError) as error:
        raise _lost(worker) from error


def _lost(worker: _Worker) -> DeepyError:
    worker.process.join(PATIENCE)
    code = worker.process.exitcode
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return DeepyError(f"a worker process died ({how}: killed, or out of memory?)")


def _start(context: Any, function: Callable[[Any], Any], earlier: list[Connection]) -> _Worker:
    ours, theirs = context.Pipe()
    forked = [*earlier, ours] if context.get_start_method() == "fork" else []
    process = context.Process(target=_work, args=(function, theirs, forked), daemon=True)
    process.start()
    theirs.close()  # or the worker's death would not close the pipe
    return _Worker(process, ours)


def _work(function: Callable[[Any], Any], connection: Connection, inherited: list[Connection]) -> None:
    for other in inherited:  # the parent's ends: open here, they would keep workers waiting after the parent's death
        other.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the workers
    try:
        while True:
            item = connection.recv()
            connection.send(_apply(function, item))
    except (EOFError, OSError):
        return  # the parent is gone or has closed the pipe


def _apply(function: Callable[[Any], Any], item: Any) -> Any:
    try:
        return function(item)
    except DeepyError as error:
        return _Failure(error, str(error))
    # Whatever it is, it is passed to the parent.
    except Exception:
        return _Failure(None, traceback.format_exc())
