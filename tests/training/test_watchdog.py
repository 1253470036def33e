"""The watchdog: whom it blames, what it waits for, and the time it takes. A real store, threads for ranks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megatron.mpu.doing import Doing
from megatron.training.progress import Progress
from megatron.training.signs import Sign, name_awaited, name_silent
from megatron.training.watchdog import Watchdog

pytestmark = pytest.mark.cpu

DATA, STEP, REST = "reading data", "training", "callbacks"


def sign(step: int, phase: str = STEP, waits: bool = True) -> Sign:
    return Sign(1, step, phase, 61.0, 60.0, waits)


@pytest.mark.parametrize(
    ("signs", "blamed"),
    [
        ([sign(21), None, sign(21), sign(21)], "rank 1 of 4 does not answer"),
        ([None, sign(21), None, sign(21)], "ranks 0, 2 of 4 do not answer"),
        ([sign(21), sign(21), sign(21), sign(21, DATA)], "rank 3 of 4 does not continue in step 21 (reading data)"),
        ([sign(21), sign(20, REST), sign(21, DATA), sign(21)], "rank 1 of 4 does not continue in step 20 (callbacks)"),
        ([sign(21), sign(21), sign(21, waits=False), sign(21)], "rank 2 of 4 does not continue in step 21 (training)"),
        ([sign(21)] * 4, "all 4 ranks make no progress in step 21 (training)"),
        ([sign(7, DATA)], "the run makes no progress in step 7 (reading data)"),
    ],
)
def test_who_is_blamed(signs: list[Sign | None], blamed: str) -> None:
    assert name_silent(dict(enumerate(signs)), len(signs)).startswith(blamed)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


class Rank:
    """A watched rank: its loop is what the test does with `progress`."""

    def __init__(self, store: dist.Store | None, rank: int, world: int, seconds: float, slow: float) -> None:
        self.progress, self.reasons, self.ended = Progress(), [], []
        self.progress.began = True
        arguments = (seconds, rank, world, store, self.reasons.append, slow, self.end)
        self.watchdog = Watchdog(self.progress, *arguments)

    def end(self, code: int) -> None:
        self.ended.append((code, time.monotonic()))

    def steps(self, count: int, seconds: float = 0.0, first: int = 1) -> None:
        for step in range(first, first + count):
            self.progress.enter(DATA, step)
            self.progress.enter(STEP, step)
            time.sleep(seconds)
            self.progress.enter(REST, step)


@contextlib.contextmanager
def ranks(store: dist.Store | None, world: int = 2, *, seconds: float, slow: float = 60.0) -> Iterator[list[Rank]]:
    made = [Rank(store, rank, world, seconds, slow) for rank in range(world)]
    with contextlib.ExitStack() as stack:
        for one in made:
            stack.enter_context(one.watchdog)
        yield made


def wait(made: list[Rank], seconds: float) -> float:
    """Until a rank has ended, or so long; how long that was."""
    start = time.monotonic()
    while not any(one.ended for one in made) and time.monotonic() - start < seconds:
        time.sleep(0.02)
    time.sleep(0.2)
    return min((one.ended[0][1] for one in made if one.ended), default=time.monotonic()) - start


def test_a_hung_step_ends_every_rank_with_code_5_and_one_reason(store: dist.Store, capfd) -> None:
    with ranks(store, 3, seconds=2.0) as made:
        for one in made:
            one.steps(3)
        made[0].progress.enter(STEP, 4)
        made[1].progress.enter(STEP, 4)
        made[2].progress.enter(STEP, 4)
        took = wait(made, 20)
        time.sleep(1.5)
    assert [[code for code, _ in one.ended] for one in made] == [[5]] * 3 and 1.9 < took < 8
    (reason,) = [reason for one in made for reason in one.reasons]
    assert "all 3 ranks make no progress in step 4" in reason  # here no rank waits in a collective
    stacks = capfd.readouterr().err
    assert all(f"rank {rank}: no progress" in stacks for rank in range(3)) and "in wait" in stacks


def test_a_rank_whose_process_is_stopped_is_named(store: dist.Store) -> None:
    with ranks(store, 2, seconds=1.5) as made:
        for one in made:
            one.steps(3)
            one.progress.enter(STEP, 4)
        time.sleep(0.3)
        made[1].watchdog.__exit__()  # as if SIGSTOP had reached the whole process
        wait(made, 10)
    assert [code for code, _ in made[0].ended] == [5] and made[1].ended == []
    assert "rank 1 of 2 does not answer" in made[0].reasons[0]


def test_a_rank_that_hosts_the_store_and_is_stopped_is_named() -> None:
    code = (
        "import time, torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, 1, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True); time.sleep(60)"
    )
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), 1, is_master=False, wait_for_workers=False)
    try:
        rank = Rank(store, 1, 2, 1.0, 60.0)
        with rank.watchdog:
            rank.steps(3)
            rank.progress.enter(STEP, 4)
            os.kill(host.pid, signal.SIGSTOP)
            assert wait([rank], 15) < 6
        assert "rank 0 of 2 does not answer" in rank.reasons[0]
    finally:
        host.kill()
        host.wait()


def test_what_may_take_long_is_waited_for(store: dist.Store) -> None:
    """Rank 0 writes a checkpoint; rank 1 waits for it in the next step."""
    with ranks(store, seconds=0.5, slow=3.0) as made:
        for one in made:
            one.steps(3)
        made[1].progress.enter(STEP, 4)
        for _ in range(10):  # a beat per parameter
            time.sleep(0.2)
            made[0].progress.beat()
        assert made[0].ended == made[1].ended == []
        assert 2.5 < wait(made, 10) < 6  # then it hangs for longer than anything may
    reasons = made[0].reasons + made[1].reasons
    assert len(reasons) == 1 and "rank 0 of 2 does not continue in step 3 (callbacks)" in reasons[0]


def test_the_first_two_steps_and_steps_that_were_always_long_are_waited_for() -> None:
    with ranks(None, 1, seconds=0.4) as (rank,):
        rank.steps(1, seconds=1.2)  # compiles
        rank.steps(1, seconds=0.8, first=2)
        rank.steps(1, seconds=0.35, first=3)
        rank.steps(1, seconds=0.7, first=4)  # twice as long as the longest
        assert rank.ended == []
        rank.progress.enter(STEP, 5)
        assert 1.8 < wait([rank], 10) < 4  # three times 0.7 s
    assert [code for code, _ in rank.ended] == [5] and "the run makes no progress in step 5" in rank.reasons[0]


def test_a_rank_that_waits_says_for_whom_and_for_what() -> None:
    def at(meetings: int, waited: float, doing: str = "") -> Sign:
        return Sign(1, 0, DATA, 0.0, 60.0, False, doing, meetings, waited)

    signs = {0: at(7, 120.4), 1: at(7, 3.0), 2: at(7, 100.0), 3: at(6, 0.0, "loading X (layer 12)")}
    assert name_awaited(signs[0], signs, 4) == "waiting 120 s for rank 3 of 4: loading X (layer 12)"
    assert name_awaited(signs[0], {**signs, 2: None}, 4).startswith("waiting 120 s for ranks 2, 3 of 4: it does not")
    assert name_awaited(signs[0], {**signs, 3: at(7, 0.1)}, 4) is None  # it has just come


def test_the_first_rank_that_waits_reports_it_again_and_again_and_nothing_ends_before_the_loop(
    store: dist.Store, caplog
) -> None:
    state = [Doing(), Doing(), Doing()]
    with contextlib.ExitStack() as stack:
        for rank in range(3):
            made = Watchdog(
                Progress(), 0.4, rank, 3, store, print, 0.4, lambda code: 1 / 0, doing=state[rank], line_seconds=0.5
            )
            stack.enter_context(made)
        stack.enter_context(state[0].now("building the sample index"))
        state[0].detail = "3 of 7"
        for one in state[1:]:
            stack.enter_context(one.waiting())
        time.sleep(2.3)
    seconds = [re.fullmatch(LINE, message)[1] for message in caplog.messages]
    assert 3 <= len(seconds) <= 4 and seconds[0] in "01" and seconds[-1] == "2"


LINE = r"waiting (\d+) s for rank 0 of 3: building the sample index \(3 of 7\)"
