"""A checkpoint that is written while the engine goes on: what it holds, and what a failure or a death leaves."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.checkpoint.agreement import meet
from megatron.checkpoint.attempt import SaveError
from megatron.checkpoint.background import BackgroundSave, aside
from megatron.checkpoint.find import list_checkpoints
from megatron.checkpoint.host_memory import HostMemory
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.save import Save, save_checkpoint
from megatron.checkpoint.stored_zip import CheckedFile
from megatron.errors import NumericsError
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.checkpoint.fake_engine import HEADS, FakeEngine
from tests.distributed import RankFailure, run_distributed

pytestmark = pytest.mark.cpu

WRITE, NAME = CheckedFile.write, "3.attention.dense.bias"


def engine_of(rank: int, pp: int, dp: int, tp: int, **options: Any) -> FakeEngine:
    state = ParallelState.build(Topology({"pipe": pp, "data": dp, "model": tp}), rank, "cpu")
    engine = FakeEngine(state, 1, tied=True, **options)  # with a head the two stages would share layer 3
    for _ in range(2):
        engine.step()
    return engine


def content(client: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"heads": HEADS, "consumed": 16, "client": {} if client is None else client, "config": {"git_hash": "abc"}}


def begin(
    root: str, step: int, engine: FakeEngine, beside: ParallelState, memory: HostMemory, **client: Any
) -> BackgroundSave:
    save = Save(root, step, engine, engine.state, **content(client))
    background = BackgroundSave(save, beside)
    save.copy(memory, background.beat)
    background.start()
    return background


def go_on_while_it_writes(
    rank: int, world: int, root: str, layout: tuple[int, int, int], dtype: torch.dtype
) -> tuple[int, int]:
    """Save twice, once in the background, whose disk is so slow that two steps are taken before the first byte."""
    engine = engine_of(rank, *layout, dtype=dtype)
    beside, memory, gate = aside(engine.state, 60), HostMemory(False), threading.Event()

    def write(file: CheckedFile, data: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(60)
        return WRITE(file, data)

    found = []
    with mock.patch.object(CheckedFile, "write", write):
        for step in (2, 4):  # the second one uses the memory again
            client: dict[str, Any] = {"seen": [step]}
            save_checkpoint(f"{root}/at_once", step, engine, engine.state, **content(client))
            background = begin(f"{root}/beside", step, engine, beside, memory, seen=client["seen"])
            for _ in range(2):
                engine.step()
            client["seen"].append("later")
            torch.rand(1)
            found += [background.running, list_checkpoints(f"{root}/beside").latest]
            gate.set()
            background.result()
            gate.clear()
            assert background.signs > 0 and background.seconds > 0
    return tuple(found)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [((1, 1, 1), torch.float32), ((2, 2, 1), torch.bfloat16), ((1, 2, 2), torch.float32)],
    ids=str,
)
def test_the_files_are_those_of_a_save_at_once_whatever_the_engine_does_meanwhile(
    tmp_path: Path, layout: tuple[int, int, int], dtype: torch.dtype
) -> None:
    world = layout[0] * layout[1] * layout[2]
    for found in run_distributed(go_on_while_it_writes, world, str(tmp_path), layout, dtype):
        assert found == (True, None, True, 2)  # while it was written, the one before it was the newest
    for step in (2, 4):
        there, here = (tmp_path / name / f"global_step{step}" for name in ("at_once", "beside"))
        names = sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file())
        assert names == sorted(str(path.relative_to(here)) for path in here.rglob("*") if path.is_file())
        for name in names:
            if name != "manifest.json":
                assert (there / name).read_bytes() == (here / name).read_bytes(), name
        manifests = [{**vars(Manifest.read(folder)), "created": ""} for folder in (there, here)]
        assert manifests[0] == manifests[1] and list_checkpoints(tmp_path / "beside").latest == 4


def fail_on_one_rank(rank: int, world: int, root: str, bad: int, when: int) -> tuple[str, list[str], str]:
    engine = engine_of(rank, 1, 2, 2)
    beside, memory = aside(engine.state, 60), HostMemory(False)
    begin(root, 1, engine, beside, memory).result()
    count = itertools.count()

    def write(file: CheckedFile, data: Any) -> int:
        if rank == bad and next(count) == when:
            raise OSError(28, "No space left on device")
        return WRITE(file, data)

    with mock.patch.object(CheckedFile, "write", write):
        background = begin(root, 2, engine, beside, memory)
        engine.step()
        try:
            background.result()
        except SaveError as error:
            message, code = str(error), error.exit_code
    meet(engine.state)
    left = sorted(os.listdir(root))
    meet(engine.state)
    begin(root, 3, engine, beside, memory).result()  # the next one needs nothing of the one that failed
    return message, left, f"{code} {list_checkpoints(root).latest}"


@pytest.mark.parametrize(("bad", "when"), [(0, 0), (3, 3), (1, 12)])
def test_a_full_disk_on_any_rank_is_an_error_on_all_and_leaves_the_one_before(
    tmp_path: Path, bad: int, when: int
) -> None:
    for message, left, after in run_distributed(fail_on_one_rank, 4, str(tmp_path), bad, when):
        assert f"step 2 was not saved: rank {bad}: " in message and "No space left" in message
        assert left == ["global_step1", "latest"] and after == "6 3"


def die_while_it_writes(rank: int, world: int, root: str, bad: int) -> None:
    engine = engine_of(rank, 1, 1, 2)
    beside, memory = aside(engine.state, 60), HostMemory(False)
    begin(root, 1, engine, beside, memory).result()
    count = itertools.count()

    def write(file: CheckedFile, data: Any) -> int:
        if rank == bad and next(count) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return WRITE(file, data)

    with mock.patch.object(CheckedFile, "write", write):
        background = begin(root, 2, engine, beside, memory)
        engine.step()
        background.result()


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path, bad: int) -> None:
    with pytest.raises(RankFailure, match=f"rank {bad}"):
        run_distributed(die_while_it_writes, 2, str(tmp_path), bad)
    assert (list_checkpoints(tmp_path).steps, list_checkpoints(tmp_path).latest) == ((1,), 1)
    list_checkpoints(tmp_path).checkpoints[1].check_files(checksums=True)
    engine = FakeEngine(ParallelState.single(), 1, tied=True)
    begin(str(tmp_path), 2, engine, engine.state, HostMemory(False)).result()
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "global_step2", "latest"]


def ruin_on_one_rank(rank: int, world: int, root: str) -> tuple[str, list[str]]:
    """1e5 is a number in fp32, and infinite in fp16, which is written."""
    engine = engine_of(rank, 2, 2, 1, dtype=torch.float16)
    beside = aside(engine.state, 60)
    if NAME in engine.masters and 15 in engine.share(NAME):
        with torch.no_grad():
            engine.masters[NAME][15] = 1e5
    background = begin(root, 2, engine, beside, HostMemory(False))
    try:
        background.result()
    except NumericsError as error:
        meet(engine.state)
        return str(error), sorted(os.listdir(root))
    return "", []


def test_weights_that_are_not_finite_as_they_would_be_written_are_an_error_on_all(tmp_path: Path) -> None:
    for message, left in run_distributed(ruin_on_one_rank, 4, str(tmp_path)):
        assert f"weights of 1 parameters are not finite at iteration 2, the first of {NAME}" in message
        assert left == []


def test_memory_is_made_once_and_grows_when_it_must() -> None:
    memory = HostMemory(False)
    values = [torch.arange(5.0), torch.ones(3, 2, dtype=torch.bfloat16), torch.tensor(7), torch.empty(0)]
    first = memory.copy(values)
    assert all(torch.equal(copy, value) and copy.dtype == value.dtype for copy, value in zip(first, values))
    place = first[0].data_ptr()
    values[0].add_(1)
    assert first[0][0] == 0 and memory.copy(values[:2])[0].data_ptr() == place and first[0][0] == 1
    assert torch.equal(memory.copy([torch.arange(1000.0)])[0], torch.arange(1000.0))
