"""Ends a job that makes no progress, and names the rank that is to blame.

Each rank has a thread that publishes in the rendezvous store what the main thread is doing. When a rank's own main
thread makes no progress for too long, the thread reads what the others do. While one of them may well be busy (a
checkpoint, an evaluation, data), it waits; when none makes progress, or some do not even publish any more (SIGSTOP, a
dead host, native code that holds the interpreter), every rank writes its Python stacks to its log and ends. Before the
checkpoint to start from is loaded, or the loop begins without one, it ends nothing.

While ranks wait for each other on the host, the first of those that wait says each minute for whom, and for what.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.errors import LostRankError
from megatron.log import get_logger
from megatron.mpu.doing import Doing
from megatron.training import flight_recorder
from megatron.training.progress import SLOW_SECONDS, Progress
from megatron.training.signs import Sign, name_awaited, name_silent

logger = get_logger(__name__)

# Where a rank waits for others, by the file of its innermost Python frame.
_COLLECTIVES = ("torch/distributed/", "deepspeed/comm/", "megatron/mpu/collectives", "megatron/checkpoint/pieces")


class Watchdog:
    """Watches the main thread of this process, as a context manager in it.

    Args:
        progress: what the main thread is doing.
        seconds: for which a step may make no progress, at least; or three times the longest of the run's earlier ones.
        rank, world_size: of the job.
        store: the job's rendezvous store (none is needed by a single rank).
        record: called on one rank with the reason for which the job ends.
        slow_seconds: for which anything else may make no progress.
        end: ends this process with an exit code, at once.
        doing: what the main thread does where others wait for it, and where it waits for them.
        line_seconds: between two lines about who is awaited.
        trace: file for the last collective operations of this rank when the job ends.
    """

    def __init__(
        self,
        progress: Progress,
        seconds: float,
        rank: int,
        world_size: int,
        store: dist.Store | None,
        record: Callable[[str], None],
        slow_seconds: float = SLOW_SECONDS,
        end: Callable[[int], Any] = os._exit,
        doing: Doing | None = None,
        line_seconds: float = 60.0,
        trace: Path | None = None,
    ) -> None:
        self.progress, self.seconds, self.rank, self.world_size = progress, seconds, rank, world_size
        self.record, self.slow_seconds, self.end = record, max(slow_seconds, seconds), end
        self.period = min(max(seconds / 40, 0.1), 5.0)
        self._patience = max(1.0, 3 * self.period)  # for an answer of the store
        # Some ranks read the signs of all and decide, not thousands.
        self._judges = self._is_judge(rank)
        self.doing, self.line_seconds, self._lines = doing or Doing(), line_seconds, 0
        self.trace = trace
        self._records = self._store_lost = False
        self._asking: threading.Thread | None = None
        self._shared = None if world_size == 1 else store
        self._store: dist.Store | None = None
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._count, self._still, self._longest = -1, 0.0, 0.0
        self._beat = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._seen_waiting: dict[int, tuple[int, float]] = {}

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        before, asking = time.monotonic(), 0.0
        while not self._stop.wait(self.period):
            started = time.monotonic()
            # Of a process that was stopped or a machine that slept, that time does not count.
            sign = self._look(min(started - before, 2 * self.period) + min(asking, 3 * self._patience))
            if (reason := self._judge(sign)) is not None:
                self._end_job(sign, reason)
                return
            before = time.monotonic()
            asking = before - started

    def _judge(self, own: Sign) -> str | None:
        """Publish our sign; why the job has to end, if it has to."""
        reason: list[str | None] = [None]
        if self._asking is None or not self._asking.is_alive():
            # On a thread of its own, since the store never answers when the process of its host is stopped.
            self._asking = threading.Thread(target=self._ask, args=(own, reason), name="watchdog-store", daemon=True)
            self._asking.start()
            self._asking.join(self._patience)
        if own.still <= own.limit or not (self._asking.is_alive() or self._store_lost):
            return reason[0]
        self._records = self.rank == 1
        return f"no progress for {own.still:.0f} s: {name_silent({0: None}, self.world_size)}"

    def _ask(self, own: Sign, reason: list[str | None]) -> None:
        try:
            if self._store is None and self._shared is not None:
                self._store = self._connect(self._shared)
            if self._store is not None and not self._store_lost:
                self._store.set(_key(self.rank), json.dumps(vars(own)))
                self._report_awaited(own)
            reason[0] = self._compare(own)
        except RuntimeError:  # the store's host is gone
            self._store_lost = True

    def _connect(self, shared: dist.Store) -> dist.Store:
        """A connection of our own: the job's is in use."""
        store = shared.clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=self._patience))
        if self.rank == 0:
            store.delete_key(_VERDICT)  # of the start before: torchrun keeps its store over restarts
        return store

    def _is_judge(self, rank: int) -> bool:
        return rank % max(1, self.world_size // 16) == 0 or rank == 1

    def _report_awaited(self, own: Sign) -> None:
        """A line about whom this rank waits for, now and then; from the first of the judges that wait."""
        if own.waited < self.line_seconds:
            self._lines = 0
            self._seen_waiting.clear()
        if not self._judges or own.waited < (self._lines + 1) * self.line_seconds:
            return
        self._lines = int(own.waited / self.line_seconds)
        signs = self._read(own, self._seen_waiting)
        for rank in filter(self._is_judge, range(self.rank)):
            if (sign := signs[rank]) is not None and sign.meetings == own.meetings and sign.waited:
                return
        if (line := name_awaited(own, signs, self.world_size)) is not None:
            logger.warning(line)

    def _compare(self, own: Sign) -> str | None:
        """Why the job has to end, from what the other ranks published."""
        if own.still <= own.limit / 2:
            self._seen.clear()
            return None
        if self._store is not None and self._store.check([_VERDICT]):
            name, _, reason = self._store.get(_VERDICT).decode().partition(" ")
            self._records = self.rank == int(name)
            return reason
        if not self._judges:
            return None
        signs = self._read(own, self._seen)
        if own.still <= own.limit or not all(sign is None or sign.still > sign.limit for sign in signs.values()):
            return None
        reason = f"no progress for {own.still:.0f} s: {name_silent(signs, self.world_size)}"
        recorder = min(rank for rank, sign in signs.items() if sign is not None)
        if self._store is not None:
            # Several may come here at once, and see different ranks: the first verdict is everybody's.
            verdict = self._store.compare_set(_VERDICT, "", f"{recorder} {reason}").decode()
            recorder, reason = int(verdict.partition(" ")[0]), verdict.partition(" ")[2]
        self._records = self.rank == recorder
        return reason

    def _look(self, elapsed: float) -> Sign:
        """What the main thread is doing, `elapsed` seconds after the look before."""
        count, step, phase = self.progress.count, self.progress.step, self.progress.phase
        warm = step > self.progress.first + 1  # the first two steps compile
        if count != self._count:
            if warm and phase == "training":
                self._longest = max(self._longest, self._still)
            self._count, self._still = count, 0.0
        else:
            self._still += elapsed
        in_step = warm and phase == "training"
        limit = (
            max(self.seconds, 3 * self._longest) if in_step else self.slow_seconds if self.progress.began else math.inf
        )
        self._beat += 1
        since, meetings = self.doing.waits_since, self.doing.meetings
        waited = 0.0 if since is None else time.monotonic() - since
        waits = self._still > limit / 2 and (since is not None or self._waits())
        return Sign(self._beat, step, phase, self._still, limit, waits, str(self.doing), meetings, waited)

    def _waits(self) -> bool:
        frame = sys._current_frames().get(self._main or 0)
        return frame is not None and any(part in frame.f_code.co_filename for part in _COLLECTIVES)

    def _read(self, own: Sign, seen: dict[int, tuple[int, float]]) -> dict[int, Sign | None]:
        """The sign of every rank; None for one whose sign has not changed for a while. `seen`: of the reads before."""
        assert self._store is not None or self.world_size == 1
        found: dict[int, Sign | None] = dict.fromkeys(range(self.world_size))
        found[self.rank] = own
        now, patience = time.monotonic(), min(own.limit / 3, 30.0)
        others = [rank for rank in found if rank != self.rank]
        if self._store is None or not others:
            return found
        if not self._store.check([_key(rank) for rank in others]):
            others = [rank for rank in others if self._store.check([_key(rank)])]
        for rank, text in zip(others, self._store.multi_get([_key(rank) for rank in others])):
            sign = Sign(**json.loads(text))
            beat, since = seen.get(rank, (-1, now))
            if sign.beat != beat:
                seen[rank] = (sign.beat, since := now)
            if now - since < patience:
                found[rank] = sign
        return found

    def _end_job(self, own: Sign, reason: str) -> None:
        # Not through sys.stderr, whose lock the main thread may hold.
        os.write(2, f"rank {self.rank}: {reason}; the Python stacks of this rank:\n".encode())
        faulthandler.dump_traceback(2, all_threads=True)
        if self._records:
            self.record(f"LostRankError: {reason}")
            os.write(2, f"LostRankError: {reason}\n".encode())
        if self.trace is not None and self.world_size > 1:
            with contextlib.suppress(OSError):
                flight_recorder.dump(self.trace)
        if not self._records:
            time.sleep(1.0)  # the first exit makes others end the rest: the reason is to be recorded before
        self.end(LostRankError.exit_code)


_VERDICT = "deepy/watchdog/verdict"


def _key(rank: int) -> str:
    return f"deepy/watchdog/{rank}"
