"""`ordered_map`: order, errors, lost workers, clean ends."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from megatron.data.tokenise.worker_pool import AHEAD_PER_WORKER, ordered_map
from megatron.errors import DeepyError, UserError

pytestmark = pytest.mark.cpu


def work(item: object) -> object:
    """Does what the item says."""
    if item == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "leave":
        os._exit(7)
    if item == "bug":
        return [][1]
    if isinstance(item, str):
        raise UserError(f"{item}: wrong")
    time.sleep(item if isinstance(item, float) else random.random() / 500)
    return item, os.getpid()


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_results_come_in_order_from_all_workers(workers: int, count: int) -> None:
    results = list(ordered_map(work, iter(range(count)), workers))
    assert [item for item, _ in results] == list(range(count))
    assert len({pid for _, pid in results}) <= workers
    if count > 100:
        assert len({pid for _, pid in results}) == workers


def test_items_are_taken_only_a_few_ahead() -> None:
    taken: list[int] = []
    stream = ordered_map(work, (taken.append(i) or i for i in range(1000)), 2)
    for seen in range(1, 50):
        next(stream)
        assert len(taken) <= seen + 2 * (AHEAD_PER_WORKER + 1)
    stream.close()


@pytest.mark.parametrize("workers", [2, 3])
def test_one_slow_item_holds_the_others_back_only_for_a_while(workers: int) -> None:
    """While it runs, as many results as may wait pile up and the other workers have nothing to do."""
    items = [0.3, *range(20), 0.3, *range(20)]
    assert [item for item, _ in ordered_map(work, items, workers)] == items


def test_large_items_and_results_do_not_jam() -> None:
    large = [bytes(1 << 20)] * 30
    assert sum(len(item) for item, _ in ordered_map(work, large, 3)) == 30 << 20


def test_the_first_error_in_order_is_raised() -> None:
    for items in ([1, "first", "second"], ["first", *range(50), "second"]):
        with pytest.raises(UserError, match="first: wrong"):
            list(ordered_map(work, items, 3))


def test_a_bug_in_a_worker_shows_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)in a worker process.*in work.*IndexError"):
        list(ordered_map(work, [1, "bug", 2], 2))


@pytest.mark.parametrize(("end", "how"), [("die", "signal 9"), ("leave", "exit code 7")])
@pytest.mark.parametrize("position", [0, 30, 59])
def test_a_lost_worker_is_an_error_at_once(end: str, how: str, position: int) -> None:
    items = [bytes(1 << 18)] * 60  # larger than a pipe holds
    started = time.monotonic()
    with pytest.raises(DeepyError, match=f"a worker process died .{how}"):
        list(ordered_map(work, [*items[:position], end, *items[position:]], 3))
    assert time.monotonic() - started < 40


def test_an_error_of_the_source_is_the_caller_s() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise UserError("the file is damaged")

    with pytest.raises(UserError, match="damaged"):
        list(ordered_map(work, source(), 2))
