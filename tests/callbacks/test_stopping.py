"""`exit_interval`, and signals to a process that trains; to one of several: tests/training/test_stop.py."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time

import psutil
import pytest

from megatron.callbacks import RunContext, stop_on_signal
from megatron.callbacks.exit_interval import ExitInterval
from megatron.callbacks.run_status import RunStatus
from megatron.callbacks.stop_on_signal import StopOnSignal
from megatron.checkpoint.lock import SaveLock
from megatron.mpu.state import ParallelState
from megatron.run.end import AnnouncedEnd
from megatron.signals import STOP_SIGNALS, raise_stop_requests
from megatron.training import progress
from megatron.training.callback import Callback
from tests.callbacks.fakes import GoesBack, Log, args_of, run_and_go_back, trainer_of

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _no_nohup():
    """The suite may run under nohup, whose SIGHUP stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("interval", "start", "end"), [(4, 0, 4), (4, 4, 8), (3, 2, 3), (0, 0, 10), (-2, 0, 10)])
def test_exit_interval_ends_at_its_multiples(interval, start, end):
    trainer = trainer_of([ExitInterval(interval)])
    trainer.step = start
    trainer.run()
    assert trainer.step == end
    assert trainer.stop_reason == (None if end == 10 else f"exit_interval {interval}")


class SendsItself(Log):
    """Sends this process a signal in step `at`."""

    def __init__(self, number, at):
        super().__init__()
        self.number, self.at = number, at

    def before_step(self, trainer):
        if trainer.step + 1 == self.at:
            os.kill(os.getpid(), self.number)


class Saves(Callback):
    def end(self, trainer):
        trainer.saved_step = trainer.step


@pytest.mark.parametrize(("saver", "code"), [([Saves()], 3), ([], 1)])
def test_a_signal_stops_a_single_process_and_the_status_says_whether_all_is_saved(tmp_path, saver, code):
    trainer = trainer_of([StopOnSignal(), SendsItself(signal.SIGTERM, 2), *saver, RunStatus(tmp_path)])
    trainer.run()
    assert (trainer.step, trainer.stop_reason) == (2, "stopped by SIGTERM")
    assert f'"exit_code": {code}' in (tmp_path / "status.json").read_text()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_every_stop_signal_does_it_and_is_given_back(number):
    before = signal.getsignal(number)
    trainer = trainer_of([StopOnSignal(), SendsItself(number, 3)])
    trainer.run()
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert (trainer.step, trainer.stop_reason, trainer.stop_code) == (3, f"stopped by {name}", 3)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_has_trained_does_not_stop_as_one_that_starts(fails):
    class Fails(Callback):
        def before_step(self, trainer):
            if fails:
                raise RuntimeError("broken")

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        raise_stop_requests()
        start = signal.getsignal(signal.SIGTERM)
        with contextlib.suppress(RuntimeError):
            trainer_of([StopOnSignal(), Fails()]).run()
        found = {signal.getsignal(number) for number in STOP_SIGNALS}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    # What the other handler does needs a process of its own: tests/test_signals.py.
    assert start not in found and len(found) == 1 and (found == {signal.SIG_IGN}) is not fails


def test_a_second_ctrl_c_ends_the_run_at_once_unless_it_is_the_same_one(tmp_path, monkeypatch):
    class Twice(Log):
        def before_step(self, trainer):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)  # from the terminal and from torchrun

    trainer = trainer_of([StopOnSignal(), Twice()])
    trainer.run()
    assert trainer.step == 1
    monkeypatch.setattr(stop_on_signal, "SAME_SECONDS", 0.0)
    trainer = trainer_of([StopOnSignal(), Twice(), RunStatus(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    status = json.loads((tmp_path / "status.json").read_text())
    assert (trainer.step, status["state"], status["exit_code"]) == (0, "failed", 130)


class TakesTime(Callback):
    """Steps of 1 s, an evaluation of 2 s after step 2, and a checkpoint of 5 s at step 3, on a clock of its own."""

    def __init__(self, now):
        self.now = now

    def time(self):
        return self.now

    monotonic = time

    def before_update(self, trainer):
        self.now += 1

    def after_step(self, trainer, out):
        if trainer.step == 2:
            self.now += 2
        if trainer.step == 3:
            trainer.progress.save_seconds = 5.0


@pytest.mark.parametrize("limit", ["job", "exit_duration_in_mins"])
def test_a_run_stops_before_its_time_limit(tmp_path, monkeypatch, limit):
    """Two steps, the longest pause and a checkpoint are 9 s, a quarter more and 10 s is 21.25 s: the first step
    that ends later than that before the end is the last."""
    monkeypatch.setattr(stop_on_signal, "FIRST_SAVE_SECONDS", 0.0)
    clock = TakesTime(int(time.time()))
    monkeypatch.setattr(stop_on_signal, "time", clock)
    monkeypatch.setattr(progress, "time", clock)
    until = clock.now + 50
    # The other limit is there as well, and far away.
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(until if limit == "job" else until + 1000))
    minutes = (until - psutil.Process().create_time()) / 60 + (10 if limit == "job" else 0)
    stop = StopOnSignal.build(RunContext(args_of(exit_duration_in_mins=minutes), ParallelState.single("cpu"), 64))
    trainer = trainer_of([clock, stop, Saves(), RunStatus(tmp_path)], train_iters=1000)
    trainer.run()
    assert until - clock.now == 21 and trainer.stop_code == 3
    assert ("time limit" if limit == "job" else f"exit_duration_in_mins {minutes:g}") in trainer.stop_reason
    assert json.loads((tmp_path / "status.json").read_text())["stop_seconds"] == pytest.approx(9)


def test_a_run_that_begins_too_late_votes_after_its_first_measured_step():
    trainer = trainer_of([StopOnSignal({"the limit": time.time() - 60}), Saves()])
    trainer.run()
    assert (trainer.step, trainer.stop_code) == (3, 3)


@pytest.mark.parametrize("minutes", [None, 0, -1.0])
def test_without_a_limit_nobody_votes_for_one(monkeypatch, minutes):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    context = RunContext(args_of(exit_duration_in_mins=minutes), ParallelState.single("cpu"), 64)
    assert set(StopOnSignal.build(context).deadlines.values()) == {math.inf}


def test_every_rank_votes_for_the_same_names_whatever_its_environment_says(monkeypatch):
    names = []
    for end in ("", str(int(time.time()) + 1000)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", end)
        context = RunContext(args_of(exit_duration_in_mins=1e6), ParallelState.single("cpu"), 64)
        trainer = trainer_of([StopOnSignal.build(context)], train_iters=3)
        trainer.run()
        assert trainer.step == 3 and trainer.stop_reason is None
        names.append(list(trainer.voters))
    assert names[0] == names[1] and len(names[0]) == len(STOP_SIGNALS) + 2


@pytest.mark.parametrize(("stop", "last"), [(None, 3), (2, 2)])
def test_the_lock_says_that_the_run_ends_while_its_last_checkpoint_is_written(tmp_path, stop, last):
    """So that the same command, started again in that time, waits for it longer than for a run that only trains."""
    ending = {}

    class WritesCheckpoints(Callback):  # in both places in which the real one does
        def after_step(self, trainer, out):
            ending[trainer.step] = json.loads((tmp_path / "lock.json").read_text()).get("ending", False)

        def end(self, trainer):
            if trainer.stop_reason is not None:
                self.after_step(trainer, None)

    stops = [ExitInterval(stop)] if stop else []
    with SaveLock(tmp_path) as lock:
        trainer_of([WritesCheckpoints(), *stops, AnnouncedEnd(lock)], train_iters=3).run()
    assert ending == {step: step == last for step in range(1, last + 1)}


def test_a_run_that_goes_back_gives_the_signals_back():
    before = signal.getsignal(signal.SIGTERM)
    run_and_go_back(trainer_of([StopOnSignal(), GoesBack(3)], train_iters=4), 1)
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_error_gives_the_signals_back():
    class Fails(Log):
        def after_step(self, trainer, out):
            raise RuntimeError("broken")

    before = signal.getsignal(signal.SIGTERM)
    trainer = trainer_of([StopOnSignal(), Fails()])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.run()
    assert signal.getsignal(signal.SIGTERM) == before
