"""The helper that all multi-process tests stand on: order, failures, hangs, crashes, leftovers."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankFailure, run_distributed
from tests.distributed.client import _SERVER, wait_until

pytestmark = pytest.mark.cpu


def identity(rank: int, world_size: int, offset: int) -> tuple[int, int]:
    time.sleep(0.05 * (world_size - rank))  # the last rank finishes first
    return rank + offset, world_size


def launcher_view(rank: int, world_size: int) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    view = {name: os.environ[name] for name in names}
    return {**view, "cwd": os.getcwd(), "given": os.environ["GIVEN_BY_TEST"], "pid": str(os.getpid())}


def reduce_and_gather(rank: int, world_size: int) -> tuple[torch.Tensor, int]:
    total = torch.tensor([float(rank + 1)], requires_grad=True)
    dist.all_reduce(total.data)
    group = dist.new_group([0, world_size - 1])
    if rank in (0, world_size - 1):
        dist.all_reduce(torch.ones(1), group=group)
    return total.detach(), torch.get_num_threads()


def random_numbers(rank: int, world_size: int) -> float:
    return torch.rand(1).item()


def raise_on_rank_1(rank: int, world_size: int, wrong: str) -> None:
    if rank == 1:
        culprit = wrong * 2
        raise ValueError(f"bad value {culprit}")
    dist.barrier()


def raise_unpicklable(rank: int, world_size: int) -> None:
    class Local(Exception):
        pass

    raise Local("only here")


def print_and_fail(rank: int, world_size: int) -> None:
    print("a line on stdout")
    print("a line on stderr", file=sys.stderr)
    os.system("echo a line from a child")
    assert rank != 0, "rank zero fails"


def hang_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        named_for_the_stack()


def named_for_the_stack() -> None:
    time.sleep(1000)


def wait_in_a_collective(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        time.sleep(1000)


def crash(rank: int, world_size: int, how: str) -> None:
    if rank == 1:
        if how == "exit":
            os._exit(7)
        ctypes.string_at(0)
    dist.barrier()


def leave_a_child(rank: int, world_size: int) -> list[int]:
    children = [subprocess.Popen(["sleep", "1000"], start_new_session=detached) for detached in (False, True)]
    return [child.pid for child in children]


def own_process_group(rank: int, world_size: int) -> bool:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return not before and total.item() == world_size


def return_a_lambda(rank: int, world_size: int) -> object:
    return lambda: rank


def deepspeed_step(rank: int, world_size: int) -> tuple[float, float]:
    import deepspeed

    model = torch.nn.Linear(4, 1)
    start = time.monotonic()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    seconds = time.monotonic() - start
    loss = engine(torch.ones(2, 4)).sum()
    engine.backward(loss)
    engine.step()
    return seconds, loss.item()


def test_results_come_in_rank_order() -> None:
    assert run_distributed(identity, 4, 10) == [(10, 4), (11, 4), (12, 4), (13, 4)]


def test_partial_and_one_rank() -> None:
    assert run_distributed(functools.partial(identity, offset=3), 1) == [(3, 1)]


def test_environment_of_a_rank(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GIVEN_BY_TEST", "yes")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.chdir(tmp_path)
    first, second = run_distributed(launcher_view, 2)
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert second["LOCAL_RANK"] == "1" and second["WORLD_SIZE"] == second["LOCAL_WORLD_SIZE"] == "2"
    assert first["MASTER_PORT"] == second["MASTER_PORT"] and first["pid"] != second["pid"]
    assert first["given"] == "yes" and first["cwd"] == str(tmp_path) and first["OMP_NUM_THREADS"] == "1"


def test_collectives_and_groups() -> None:
    for total, threads in run_distributed(reduce_and_gather, 3):
        assert total.item() == 6.0 and threads == 1


def test_every_call_and_rank_starts_from_the_same_seed() -> None:
    assert len(set(run_distributed(random_numbers, 2) + run_distributed(random_numbers, 2))) == 1


def test_deepspeed_initializes_without_compiling_or_long_imports() -> None:
    results = run_distributed(deepspeed_step, 2)
    assert results[0][1] == results[1][1]
    assert max(seconds for seconds, _ in results) < 20  # 0.2 s on an idle machine, a minute and more without preloading


def test_failure_shows_rank_traceback_and_locals() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_distributed(raise_on_rank_1, 2, "ab")
    text = str(failure.value)
    assert re.search(r"raise_on_rank_1, world_size=2\).*rank 1 .*ValueError: bad value abab", text)
    assert "in raise_on_rank_1" in text and "culprit = 'abab'" in text and "rank 0" in text
    assert isinstance(failure.value.exceptions[1], ValueError)
    assert time.monotonic() - start < 50  # the waiting rank is not left until the timeout


def test_exception_that_does_not_pickle_is_still_shown() -> None:
    with pytest.raises(RankFailure, match="only here") as failure:
        run_distributed(raise_unpicklable, 1)
    assert failure.value.exceptions == {}


def test_result_that_does_not_pickle_is_an_error() -> None:
    with pytest.raises(RankFailure, match=r"rank 0 raised .*return_a_lambda"):
        run_distributed(return_a_lambda, 1)


def test_failure_shows_output_of_the_rank_and_its_children() -> None:
    with pytest.raises(RankFailure, match="rank zero fails") as failure:
        run_distributed(print_and_fail, 2)
    for line in ("a line on stdout", "a line on stderr", "a line from a child"):
        assert line in str(failure.value)


def test_output_of_a_good_run_reaches_stdout(capsys) -> None:
    run_distributed(leave_a_child, 1)
    with pytest.raises(RankFailure):
        run_distributed(print_and_fail, 1)
    run_distributed(printing, 2)
    assert "[rank 1] hello from 1" in capsys.readouterr().out


def printing(rank: int, world_size: int) -> None:
    print(f"hello from {rank}")


def test_hang_is_killed_and_shows_the_stack() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_distributed(hang_on_rank_0, 2, timeout=2)
    assert re.search(r"rank 0 .*\b2 s\b", str(failure.value))
    assert "named_for_the_stack" in str(failure.value) and "rank 1 had finished" in str(failure.value)
    assert time.monotonic() - start < 40


def test_hang_in_a_collective_shows_every_rank() -> None:
    with pytest.raises(RankFailure) as failure:
        run_distributed(wait_in_a_collective, 2, timeout=2)
    text = str(failure.value)
    assert "rank 0 was still running" in text and "barrier" in text
    assert "rank 1 was still running" in text and "wait_in_a_collective" in text


@pytest.mark.parametrize(("how", "expected"), [("exit", "exit code 7"), ("segfault", "signal 11")])
def test_dead_rank_is_named(how: str, expected: str) -> None:
    with pytest.raises(RankFailure, match=f"rank 1 died \\({expected}\\)") as failure:
        run_distributed(crash, 2, how)
    if how == "segfault":
        assert "in crash" in str(failure.value)


def test_the_server_continues_after_failures() -> None:
    run_distributed(identity, 1, 0)
    server = _SERVER._process
    with pytest.raises(RankFailure):
        run_distributed(crash, 2, "exit")
    assert run_distributed(identity, 1, 0) == [(0, 1)]
    assert _SERVER._process is server


def test_nothing_is_left_running() -> None:
    pids = [pid for result in run_distributed(leave_a_child, 2) for pid in result]
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 10)
    if _SERVER._owner == os.getpid():
        assert psutil.Process(_SERVER._process.pid).children() == []


def test_backend_none_leaves_the_process_group_to_the_function() -> None:
    assert run_distributed(own_process_group, 2, backend=None) == [True, True]


def test_a_function_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match="importable.*lambda"):
        run_distributed(lambda rank, world_size: None, 1)


@pytest.mark.slow
def test_a_module_that_starts_threads_is_refused_and_forgotten() -> None:
    """Forking beside threads can deadlock: better a clear error, and a fresh server for the tests that follow."""
    from tests.distributed import starts_a_thread  # the server imports this file too

    with pytest.raises(RankFailure, match="importing tests.distributed.starts_a_thread started threads"):
        run_distributed(starts_a_thread.nothing, 1)
    assert run_distributed(identity, 1, 0) == [(0, 1)]


SESSION = """
import sys, time
from tests.distributed.client import _SERVER
_SERVER.start()
print(_SERVER._process.pid, _SERVER._folder, flush=True)
time.sleep(1000 if sys.argv[1] == "kill" else 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "kill"])
def test_the_server_ends_with_the_session(how: str) -> None:
    """However the session ends, kill -9 included, no server stays behind."""
    session = subprocess.Popen([sys.executable, "-c", SESSION, how], stdout=subprocess.PIPE, text=True)
    pid, folder = session.stdout.readline().split()
    assert psutil.pid_exists(int(pid))
    if how == "kill":
        session.kill()
    session.wait(30)
    session.stdout.close()
    assert wait_until(lambda: not psutil.pid_exists(int(pid)), 100)
    assert not os.path.exists(folder)
