"""All ranks continue or all stop: errors are exchanged after each phase, so that none waits for a dead one.

Everything here goes over `state.host`, where a rank may wait long for another's work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.errors import DeepyError, as_shown
from megatron.mpu.state import ParallelState

T = TypeVar("T")
_ROUND_SECONDS = 1.0


def agree(error: BaseException | None, state: ParallelState) -> dict[int, BaseException]:
    """Exchange errors over all ranks: {rank: error} of those that have one. Collective; also a barrier.

    An error that is not a `DeepyError` arrives as one: as users are to see it, else with its class in the text.
    """
    if error is not None:
        error = as_shown(error) or DeepyError(f"{type(error).__name__}: {error}")
    if state.host is None:
        return {} if error is None else {0: error}
    failed = torch.tensor([error is not None], dtype=torch.int32)
    with state.doing.waiting():
        dist.all_reduce(failed, group=state.host)
    if not failed.item():
        return {}
    return {rank: found for rank, found in enumerate(gather(error, state)) if found is not None}


@contextmanager
def together(what: str, state: ParallelState) -> Iterator[None]:
    """Run a phase on every rank; when it raises on any of them, it raises on all.

    The body must not communicate after a point where it can fail. A rank that failed raises its own error again;
    the others raise one of the same class (and so the same exit code) that names the rank. Collective.
    """
    error: Exception | None = None
    try:
        with state.doing.now(what):
            yield
    except Exception as caught:  # whatever it is, the other ranks must learn of it first
        error = caught
    failures = agree(error, state)
    if error is not None:
        raise error
    if failures:
        rank, other = next(iter(failures.items()))
        raise type(other)(f"{what} failed on rank {rank}: {other}")


def gather(value: Any, state: ParallelState) -> list[Any]:
    """`value` of every rank, in rank order. Collective."""
    with state.doing.waiting():
        return _gather(value, state)


def gather_over_stages(value: Any, state: ParallelState) -> list[Any]:
    """`value` of every pipeline stage (same data and tensor-parallel rank), first stage first. Collective."""
    first, *later = (
        state.topology.rank(**{**state.topology.coord(state.rank), "pipe": i}) for i in range(state.pp_size)
    )
    if not later:
        return [value]
    box = [value]
    with state.doing.waiting():
        if state.rank != first:
            dist.send_object_list(box, dst=first, group=state.host)
            dist.recv_object_list(box, src=first, group=state.host)
            return box[0]
        values = [value]
        for rank in later:
            dist.recv_object_list(box, src=rank, group=state.host)
            values.append(box[0])
        for rank in later:
            dist.send_object_list([values], dst=rank, group=state.host)
    return values


def broadcast(value: T, state: ParallelState) -> T:
    """Rank 0's `value`, on every rank. Collective."""
    box = [value]
    if state.host is not None:
        with state.doing.waiting():
            dist.broadcast_object_list(box, src=0, group=state.host)
    return box[0]


def meet(state: ParallelState) -> None:
    """Wait for all ranks."""
    if state.host is not None:
        with state.doing.waiting():
            dist.barrier(group=state.host)


def await_thread(thread: threading.Thread | None, state: ParallelState) -> Iterator[None]:
    """Wait until `thread`, which one rank has (None elsewhere), has ended; yields about once a second. Collective.

    However long it takes, no rank stays in one collective operation: its limit would end the job.
    """
    with state.doing.waiting() if thread is None else state.doing.now(thread.name):
        running = True
        while running:
            if thread is not None:
                thread.join(_ROUND_SECONDS)
            alive = thread is not None and thread.is_alive()
            running = any(_gather(alive, state))
            yield
    if thread is not None:
        state.doing.meetings += 1  # as those that waited


def _gather(value: Any, state: ParallelState) -> list[Any]:
    if state.host is None:
        return [value]
    values: list[Any] = [None] * state.topology.world_size
    dist.all_gather_object(values, value, group=state.host)
    return values
