"""All ranks continue or all stop: errors are exchanged after each phase, so that none waits for a dead one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.errors import DeepyError, as_shown
from megatron.mpu.state import ParallelState

_ROUND_SECONDS = 1.0


def agree(error: BaseException | None, state: ParallelState) -> dict[int, BaseException]:
    """Exchange errors over all ranks: {rank: error} of those that have one. Collective; also a barrier.

    An error that is not a `DeepyError` arrives as one: as users are to see it, else with its class in the text.
    """
    if error is not None:
        error = as_shown(error) or DeepyError(f"{type(error).__name__}: {error}")
    if state.topology.world_size == 1:
        return {} if error is None else {0: error}
    failed = torch.tensor([error is not None], dtype=torch.int32, device=state.device)
    dist.all_reduce(failed)
    if not failed.item():
        return {}
    errors: list[BaseException | None] = [None] * state.topology.world_size
    dist.all_gather_object(errors, error)
    return {rank: found for rank, found in enumerate(errors) if found is not None}


@contextmanager
def together(what: str, state: ParallelState) -> Iterator[None]:
    """Run a phase on every rank; when it raises on any of them, it raises on all.

    The body must not communicate after a point where it can fail. A rank that failed raises its own error again;
    the others raise one of the same class (and so the same exit code) that names the rank. Collective.
    """
    error: Exception | None = None
    try:
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
    if state.topology.world_size == 1:
        return [value]
    values: list[Any] = [None] * state.topology.world_size
    dist.all_gather_object(values, value)
    return values


def gather_over_stages(value: Any, state: ParallelState) -> list[Any]:
    """`value` of every pipeline stage (same data and tensor-parallel rank), first stage first. Collective."""
    group = state.group("pipe")
    if group is None:
        return [value]
    values: list[Any] = [None] * state.pp_size
    dist.all_gather_object(values, value, group=group)
    return values


def await_thread(thread: threading.Thread | None, state: ParallelState) -> Iterator[None]:
    """Wait until `thread`, which one rank has (None elsewhere), has ended; yields about once a second. Collective.

    However long it takes, no rank stays in one collective operation: their timeout would end the job.
    """
    running = True
    while running:
        if thread is not None:
            thread.join(_ROUND_SECONDS)
        running = any(gather(thread is not None and thread.is_alive(), state))
        yield
