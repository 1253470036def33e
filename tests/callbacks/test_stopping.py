"""`exit_interval`, and a signal that reaches one rank only."""

from __future__ import annotations

import os
import signal

import pytest

from megatron.callbacks.exit_interval import ExitInterval
from megatron.callbacks.run_status import RunStatus
from megatron.callbacks.stop_on_signal import StopOnSignal
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.training.callback import Callback
from tests.callbacks.fakes import Log, trainer_of
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu


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


def stop_one(rank, world, number):
    state = ParallelState.build(Topology({"pipe": 1, "data": world, "model": 1}), rank, "cpu")
    before = signal.getsignal(number)
    ended = Log()
    callbacks = [StopOnSignal(), ended] + ([SendsItself(number, 3)] if rank == 1 else [])
    trainer = trainer_of(callbacks, state=state)
    during = signal.getsignal(number)
    trainer.run()
    return trainer.step, trainer.stop_reason, during != before, signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(number):
    assert run_distributed(stop_one, 2, number) == [(3, f"stopped by {number.name}", True, True)] * 2


class Saves(Callback):
    def end(self, trainer):
        trainer.saved_step = trainer.step


@pytest.mark.parametrize(("saver", "code"), [([Saves()], 3), ([], 1)])
def test_a_signal_stops_a_single_process_and_the_status_says_whether_all_is_saved(tmp_path, saver, code):
    trainer = trainer_of([StopOnSignal(), SendsItself(signal.SIGTERM, 2), *saver, RunStatus(tmp_path)])
    trainer.run()
    assert (trainer.step, trainer.stop_reason) == (2, "stopped by SIGTERM")
    assert f'"exit_code": {code}' in (tmp_path / "status.json").read_text()


def test_an_error_gives_the_signals_back():
    class Fails(Log):
        def after_step(self, trainer, out):
            raise RuntimeError("broken")

    before = signal.getsignal(signal.SIGTERM)
    trainer = trainer_of([StopOnSignal(), Fails()])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.run()
    assert signal.getsignal(signal.SIGTERM) == before
