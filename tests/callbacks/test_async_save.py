"""Checkpoints that are written while the loop goes on, and temporary ones: in what order things happen."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.callbacks import checkpointer
from megatron.callbacks.checkpointer import WRITING, Checkpointer
from megatron.callbacks.exit_interval import ExitInterval
from megatron.callbacks.skipped_steps import SkippedSteps
from megatron.callbacks.stop_on_signal import StopOnSignal
from megatron.checkpoint.attempt import NoRoomError
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.stored_zip import CheckedFile
from megatron.errors import NumericsError
from megatron.training.callback import Callback
from tests.callbacks.fakes import Log, out, trainer_of
from tests.callbacks.test_checkpointer import BAD, on_disk
from tests.callbacks.test_stopping import SendsItself

pytestmark = pytest.mark.cpu

WRITE = CheckedFile.write


class SlowDisk(Callback):
    """A disk that takes nothing of the background until the loop has done the step `until` (None: it never does);
    notes what happened, and checks that no hook waited for it."""

    def __init__(self, folder: Path, until: int | None, fault: BaseException | None = None) -> None:
        self.folder, self.until, self.fault = folder, until, fault
        self.events: list[tuple[str, int]] = []
        self.gate = threading.Event()

    def write(self, file: CheckedFile, data: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(30)
            if self.fault is not None:
                raise self.fault
        return WRITE(file, data)

    def after_step(self, trainer: Any, out: Any) -> None:
        self.events.append(("step", trainer.step))
        if trainer.step == self.until:
            assert WRITING in trainer.voted
            self.gate.set()
            thread = trainer.callbacks[-2]._writing.thread
            thread.join(30)  # so that the next vote is over it

    def saved(self, trainer: Any, path: str) -> None:
        self.events.append(("saved", trainer.saved_step))
        assert path == str(self.folder / f"global_step{trainer.saved_step}") and Path(path, "manifest.json").exists()


def run(folder: Path, disk: SlowDisk, *more: Callback, outs: Any = (), **keys: Any) -> Checkpointer:
    saver = Checkpointer(folder, {})
    keys = {"async_save": True, "train_iters": 6, **keys}
    trainer = trainer_of([SkippedSteps(0), *more, saver, disk], outs, **keys)
    with mock.patch.object(CheckedFile, "write", lambda file, data: disk.write(file, data)):
        trainer.run()
    return saver


def test_the_loop_goes_on_while_a_slow_disk_takes_a_checkpoint_and_hears_of_it_when_it_is_complete(
    tmp_path: Path,
) -> None:
    disk = SlowDisk(tmp_path, until=4)
    run(tmp_path, disk, extra_save_iters=[1])
    steps = [("step", n) for n in range(1, 7)]
    assert disk.events == [*steps[:4], ("saved", 1), *steps[4:], ("saved", 6)] and on_disk(tmp_path) == [1, 6]


def test_a_second_save_and_the_end_wait_for_the_one_under_way(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path, until=None)

    class Release(Callback):
        """Opens the gate a moment after a hook has begun to wait."""

        def after_step(self, trainer: Any, out: Any) -> None:
            if trainer.step in (3, 6):
                threading.Timer(0.3, disk.gate.set).start()
            elif trainer.step == 5:
                trainer.callbacks[-2]._writing.thread.join()
                disk.gate.clear()

    run(tmp_path, disk, Release(), extra_save_iters=[1, 3, 5])
    steps = [("step", n) for n in range(1, 7)]
    for step in (4, 5):  # the disk takes the second one at once: it may be known in either
        expected = [*steps[:2], ("saved", 1), *steps[2 : step - 1], ("saved", 3), *steps[step - 1 :]]
        if disk.events == [*expected, ("saved", 5), ("saved", 6)]:
            return
    raise AssertionError(disk.events)


def test_a_failed_writer_ends_the_run_before_its_next_step(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path, 3, OSError(28, "No space left on device"))
    with pytest.raises(NoRoomError, match="of step 2 was not saved: rank 0: .*No space left") as error:
        run(tmp_path, disk, extra_save_iters=[2])
    assert error.value.exit_code == 6 and disk.events[-1] == ("step", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == []


class Raise(Callback):
    def __init__(self, step: int, error: BaseException) -> None:
        self.step, self.raised = step, error

    def after_step(self, trainer: Any, out: Any) -> None:
        if trainer.step == self.step:
            raise self.raised


def test_another_error_leaves_the_one_under_way_its_time(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path, until=None)
    threading.Timer(0.5, disk.gate.set).start()
    with pytest.raises(RuntimeError, match="broken"):
        run(tmp_path, disk, Raise(3, RuntimeError("broken")), extra_save_iters=[2])
    assert on_disk(tmp_path) == [2] and (tmp_path / "latest").read_text() == "global_step2"


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path, until=None)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, disk, Raise(3, KeyboardInterrupt()), extra_save_iters=[2])
    assert time.monotonic() - started < 20 and on_disk(tmp_path) == []
    disk.gate.set()


def test_bad_numbers_while_it_is_written_leave_latest_at_the_good_one(tmp_path: Path) -> None:
    """Step 3 is sane, so the weights of step 2 are good; those of step 4 took none."""
    disk = SlowDisk(tmp_path, until=None)
    disk.gate.set()
    with pytest.raises(NumericsError, match="in a row"):
        outs = [out()] * 3 + [BAD] * 3
        saver, keys = Checkpointer(tmp_path, {}), {"async_save": True, "keep_last_n_checkpoints": 1}
        trainer_of([SkippedSteps(3), saver], outs, checkpoint_factor=2, **keys).run()
    assert on_disk(tmp_path) == [2, 4] and (tmp_path / "latest").read_text() == "global_step2" and saver.good == 2


def test_weights_that_are_not_finite_end_the_run_with_code_4_and_replace_nothing(tmp_path: Path) -> None:
    class Ruin(Callback):
        def after_step(self, trainer: Any, out: Any) -> None:
            if trainer.step == 4:
                with torch.no_grad():
                    trainer.engine.masters["3.attention.dense.bias"][1] = float("nan")

    disk = SlowDisk(tmp_path, until=None)
    disk.gate.set()
    with pytest.raises(NumericsError, match=r"\b1 parameters .*iteration 4\b.*dense\.bias\b.* iteration 2\b"):
        run(tmp_path, disk, Ruin(), checkpoint_factor=2)
    assert on_disk(tmp_path) == [2] and (tmp_path / "latest").read_text() == "global_step2"


@pytest.mark.parametrize("step", [2, 4])
def test_what_a_checkpoint_under_way_is_worth_is_known_when_it_is_complete(tmp_path: Path, step: int) -> None:
    """It is good by the step after it, not by those at which it was complete."""
    outs = [out(500.0) if number == 3 else out() for number in range(1, 7)]
    first = [out()] if step == 4 else []
    disk, seen = SlowDisk(tmp_path, until=step + 2 - len(first)), []

    class Look(Callback):
        def after_step(self, trainer: Any, out: Any) -> None:
            seen.append(trainer.callbacks[-2].good)

    keys = {"extra_save_iters": [step - len(first)], "train_iters": 7}
    saver = run(tmp_path, disk, Look(), outs=outs[len(first) :], **keys)
    assert (seen[-1] is not None) is (step == 4) and saver.good == 7


class Clock:
    """Stands for `time` in the checkpointer: a step takes a minute."""

    def __init__(self, trainer: Any = None) -> None:
        self.trainer = trainer

    def monotonic(self) -> float:
        return 60.0 * (self.trainer.step if self.trainer is not None else 0)


def temporary(
    folder: Path, start: int = 0, before: Any = (), after: Any = (), **keys: Any
) -> tuple[list[int], list[int], list[int]]:
    """Steps saved, in order; left; left and temporary."""
    log, clock, saver = Log(), Clock(), Checkpointer(folder, {})
    trainer = trainer_of([*before, saver, log, *after], temporary_checkpoint_minutes=2, **keys)
    trainer.step, clock.trainer = start, trainer
    with mock.patch.object(checkpointer, "time", clock):
        trainer.run()
    left = on_disk(folder)
    marked = [step for step in left if Manifest.read(folder / f"global_step{step}").temporary]
    return log.saved_, left, marked


def test_a_temporary_checkpoint_goes_when_a_later_one_is_complete(tmp_path: Path) -> None:
    """Ranks vote at the start of a step: two minutes after step 3 that is in step 6. Step 7 is the latest good one."""
    saved, left, marked = temporary(tmp_path, checkpoint_factor=7, extra_save_iters=[1], train_iters=10)
    assert (saved, left, marked) == ([1, 4, 7, 10], [1, 7, 10], [])


@pytest.mark.parametrize("planned", [True, False])
def test_the_checkpoint_with_which_a_run_stops_lasts(tmp_path: Path, planned: bool) -> None:
    """A temporary one is due at the same step."""
    before = [ExitInterval(3)] if planned else [SendsItself(signal.SIGTERM, 3)]
    saved, left, marked = temporary(tmp_path, before=before, after=[] if planned else [StopOnSignal()])
    assert (saved, left, marked) == ([3], [3], [])


def test_what_else_ranks_vote_for_ends_no_run(tmp_path: Path) -> None:
    class Votes(Callback):
        def start(self, trainer: Any) -> None:
            trainer.voters["of a plugin"] = lambda: True

    saved, left, marked = temporary(tmp_path, before=[Votes()], checkpoint_factor=0, train_iters=4)
    assert (saved, left) == ([3, 4], [4]) and not marked


def test_temporary_ones_do_not_count_for_those_that_are_kept(tmp_path: Path) -> None:
    saved, left, marked = temporary(tmp_path, checkpoint_factor=5, keep_last_n_checkpoints=2, train_iters=13)
    assert (saved, left) == ([3, 5, 8, 10, 13], [10, 13]) and not marked


def test_one_that_an_earlier_job_left_goes_after_the_next_and_one_at_a_step_to_be_kept_stays(tmp_path: Path) -> None:
    run_of = {"checkpoint_factor": 0, "train_iters": 100}

    class Stop(Callback):
        def after_step(self, trainer: Any, out: Any) -> None:
            if trainer.step == 8:
                raise RuntimeError("killed")

    log, clock = Log(), Clock()
    trainer = trainer_of([Checkpointer(tmp_path, {}), log, Stop()], temporary_checkpoint_minutes=2, **run_of)
    clock.trainer = trainer
    with pytest.raises(RuntimeError), mock.patch.object(checkpointer, "time", clock):
        trainer.run()
    assert log.saved_ == [3, 6] and on_disk(tmp_path) == [6]
    later = Checkpointer(tmp_path, {})
    trainer = trainer_of([later], checkpoint_factor=3, train_iters=8)
    trainer.step = 6
    trainer.run()
    assert on_disk(tmp_path) == [6, 8]  # step 6 is one of checkpoint_factor: 3
    trainer = trainer_of([Checkpointer(tmp_path, {})], checkpoint_factor=4, train_iters=9)
    trainer.step = 8
    trainer.run()
    assert on_disk(tmp_path) == [8, 9]
