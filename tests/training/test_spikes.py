"""`on_spike`: a loss that jumps up is reported, or the run goes back and leaves out the samples of it."""

from __future__ import annotations

import gc
import json
import re
import shutil
from unittest import mock

import pytest

from megatron.callbacks.checkpointer import Checkpointer
from megatron.callbacks.exit_interval import ExitInterval
from megatron.callbacks.garbage_collection import GarbageCollection
from megatron.callbacks.loss_spikes import LossSpikes
from megatron.checkpoint.find import list_checkpoints, open_checkpoint
from megatron.checkpoint.lock import SaveLock
from megatron.checkpoint.rewinds import Rewind, choose_rewind, read_rewinds
from megatron.run import rewind as going_back
from megatron.run.end import AnnouncedEnd
from megatron.training.callback import Callback
from tests.callbacks.fakes import Log, out, trainer_of
from tests.training.runs import Faults, corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

SPIKE = {"window": 8, "sigma": 20, "steps": 1, "before": 1}
BF16 = {"precision": "bfloat16"}
BEGIN = {"checkpoint_factor": None, "extra_save_iters": [0]}  # no moments yet
FEW = {"do": "warn", "window": 4, "sigma": 6.0, "steps": 2, "before": 0, "most": 0}
CALM = [2.0, 2.1, 2.0, 2.1]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


def watch(losses, norms=None, **more):
    spikes, log = LossSpikes(None, **{**FEW, **more}), Log()
    norms = norms or [1.0 + 0.1 * (i % 2) for i in range(len(losses))]
    steps = [out(loss, norm) for loss, norm in zip(losses, norms, strict=True)]
    trainer_of([spikes, log], steps, train_iters=len(losses), log_interval=1).run()
    return spikes


@pytest.fixture(autouse=True)
def heard(caplog):
    """Messages go where nobody has said yet where they go."""
    caplog.set_level("INFO", logger="megatron")


def test_a_single_high_loss_is_scored_and_is_no_spike(caplog):
    spikes = watch([*CALM, 9.0, 2.0, 2.1, 2.0], [1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 1.0, 30.0])
    assert spikes.state_dict()["flagged"] == [[5], [8]] and spikes.state_dict()["seen"] == 8
    assert "since iteration" not in caplog.text


def test_a_loss_that_stays_high_is_reported_once_and_becomes_the_measure(caplog):
    spikes = watch([*CALM, 9.0, 9.1, 9.0, 9.1, 9.0])
    assert spikes.state_dict()["flagged"][0] == [5, 6]
    assert re.findall(r"above 2\.\d+ since iteration 5, 9.1000 at 6", caplog.text)


def test_a_spike_goes_on_after_a_restart():
    first, second = LossSpikes(None, **FEW), LossSpikes(None, **FEW)
    trainer_of([first], [out(x) for x in [*CALM, 9.0]], train_iters=5).run()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict() and second.state_dict()["high"] == [[9.0, 1.0]]


@pytest.mark.parametrize(
    ("layout", "keys", "late", "to"),
    [
        (Layout(), {"no_load_optim": True, "no_load_rng": True}, True, 4),
        (Layout(dp=2, zero=1), {**BF16, "async_save": True}, False, 4),
        pytest.param(Layout(pp=2, tp=2), {}, False, 4, marks=pytest.mark.slow),
        pytest.param(Layout(dp=2, zero=3), BEGIN, False, 0, marks=pytest.mark.slow),
        pytest.param(Layout(dp=2, engine="native"), {**BF16, **BEGIN}, True, 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_goes_back_and_leaves_out_the_samples_of_the_spike(tmp_path, data, layout, keys, late, to):
    save = tmp_path / "save"
    keys = {"checkpoint_factor": 2, **keys, "data_path": data, "train_iters": 9}
    watched = {**keys, "save": str(save), "on_spike": {**SPIKE, "do": "rewind"}}
    # With nothing to train on in those steps from the beginning, it is the same run.
    straight = run({**keys, "async_save": False}, layout, Faults(all_masked=(6, 7)))
    for report, whole in zip(run(watched, layout, Faults(ruined=(7, 1), late=late)), straight, strict=True):
        assert report.exit_code == 0 and not report.error
        again = report.steps.index(to + 1, report.steps.index(6))  # of the last pass
        steps = list(range(1, 10))
        assert report.steps[:again] == steps[:7][:again] and report.steps[again:] == steps[to:]
        assert report.loss[again:] == whole.loss[to:] and report.lr[again:] == whole.lr[to:]
        assert report.state == whole.state
    record = json.loads((save / "rewinds.json").read_text())
    assert record == {"rewinds": [{"to": to, "first": 7, "last": 7, "skip": 6}]}
    # A start from a checkpoint from before the spike knows what to leave out, also one that only warns.
    for step in (6, 8, 9):
        shutil.rmtree(save / f"global_step{step}", ignore_errors=True)
    watched |= {"on_spike": SPIKE, "no_load_optim": False, "no_load_rng": False}
    for report, whole in zip(run(watched, layout), straight, strict=True):
        assert report.steps == steps[to:] and report.state == whole.state


def test_a_run_that_spikes_again_and_again_ends_with_code_4(tmp_path, data):
    save = tmp_path / "save"
    keys = {"data_path": data, "train_iters": 9, "checkpoint_factor": 2, "save": str(save)}
    keys["on_spike"] = {**SPIKE, "do": "rewind", "before": 0, "most": 1}
    # The samples of 7 are left out, so the second time it shows at 8.
    (report,) = run(keys, faults=Faults(ruined=(7, 2)))
    assert report.exit_code == 4 and re.search(r"since iteration 8, .* back 1 times", report.error)
    status = json.loads((save / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 4)


def test_without_a_checkpoint_the_run_goes_on(tmp_path, caplog):
    spikes = LossSpikes(tmp_path, **{**FEW, "do": "rewind"})
    trainer_of([spikes], [out(x) for x in [*CALM, 9.0, 9.1]], train_iters=8).run()
    assert "no checkpoint is old enough" in caplog.text and not list(tmp_path.iterdir())


def spiking(save, *more, steps=8, **keys):
    """A run whose loss is high at 7 and 8; checkpoints at 2, 4, 6, 8."""
    spikes = LossSpikes(save, **{**FEW, "do": "rewind", "most": 1, **keys})
    losses = [2.0, 2.1, 2.0, 2.1, 2.0, 2.1, 9.0, 9.1]
    callbacks = [spikes, GarbageCollection(2), Checkpointer(save, {}), *more]
    return spikes, trainer_of(callbacks, map(out, losses), train_iters=steps, save=str(save), checkpoint_factor=2)


FOUND = Rewind(to=4, first=7, last=8, skip=7)


class Last(Callback):
    heard = None

    def error(self, trainer, error):
        self.heard = error


class Fails(Callback):
    def error(self, trainer, error):
        raise ValueError("in the hook")


def test_an_error_while_going_back_reaches_every_callback(tmp_path, caplog):
    last = Last()
    _, trainer = spiking(tmp_path, Fails(), last)
    with mock.patch.object(going_back, "restore", side_effect=RuntimeError("no such disk")):
        with pytest.raises(RuntimeError, match="no such disk") as error:
            going_back.train_with_rewinds(trainer)
    assert last.heard is error.value and "Fails" in caplog.text and "in the hook" in caplog.text
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_it_is_recorded_once_a_start_would_go_back_too(tmp_path):
    _, trainer = spiking(tmp_path)
    with mock.patch.object(going_back, "write_latest", side_effect=OSError("killed")):
        with pytest.raises(OSError, match="killed"):
            going_back.train_with_rewinds(trainer)
    assert read_rewinds(tmp_path) == []


def test_the_watchdog_takes_going_back_for_no_step(tmp_path):
    _, trainer = spiking(tmp_path)
    trainer.late = True  # on an accelerator the spike is known within the next step
    phases = []
    with mock.patch.object(
        going_back, "restore", lambda trainer, *_, **__: phases.append(trainer.progress.phase) or 1 / 0
    ):
        with pytest.raises(ZeroDivisionError):
            going_back.train_with_rewinds(trainer)
    assert phases == ["callbacks"]


@pytest.mark.parametrize("late", [False, True])
def test_a_planned_stop_in_the_step_of_a_spike_is_planned_no_more(tmp_path, late):
    ending = []

    class Looks(Callback):
        def before_step(self, trainer):
            ending.append(json.loads((tmp_path / "lock.json").read_text())["ending"])

    with SaveLock(tmp_path) as lock:
        _, trainer = spiking(tmp_path, ExitInterval(8), Looks(), AnnouncedEnd(lock), steps=12)
        trainer.late = late
        going_back.train_with_rewinds(trainer)
    assert trainer.step == 8 and trainer.stop_reason == "exit_interval 8" and ending == [False] * (8 + 4)


def test_a_stop_that_was_asked_for_in_the_step_of_a_spike_stays(tmp_path):
    class Asked(Callback):
        def after_step(self, trainer, out):
            if trainer.step == 8:
                trainer.request_stop("stopped by SIGTERM", 3)

    _, trainer = spiking(tmp_path)
    trainer.callbacks.insert(0, Asked())
    going_back.train_with_rewinds(trainer)
    assert (trainer.step, trainer.saved_step, trainer.stop_code) == (4, 4, 3)


def test_later_checkpoints_know_what_is_left_out(tmp_path):
    spikes, trainer = spiking(tmp_path)
    going_back.train_with_rewinds(trainer)
    assert trainer.step == 8 and spikes.rewinds == read_rewinds(tmp_path) == [FOUND]
    state = open_checkpoint(tmp_path / "global_step8").callbacks["LossSpikes"]
    other = LossSpikes(None, **FEW)
    other.load_state_dict(state)
    assert other.rewinds == [FOUND]
    other.load_state_dict(open_checkpoint(tmp_path / "global_step4").callbacks["LossSpikes"])
    assert other.rewinds == [FOUND]


def test_a_rewind_does_not_go_back_to_a_line_that_was_abandoned(tmp_path):
    _, trainer = spiking(tmp_path)
    trainer.callbacks = trainer.callbacks[1:]
    trainer.run()
    assert choose_rewind(tmp_path, 9, 9, 0).to == 6
    _, trainer = spiking(tmp_path)
    with mock.patch.object(going_back, "write_latest", side_effect=OSError("killed")):
        with pytest.raises(OSError, match="killed"):
            going_back.train_with_rewinds(trainer)
    assert choose_rewind(tmp_path, 9, 9, 0).to == list_checkpoints(tmp_path).latest == 4
    shutil.rmtree(tmp_path)
    _, trainer = spiking(tmp_path)
    going_back.train_with_rewinds(trainer)
    assert choose_rewind(tmp_path, 9, 9, 0).to == 6


def test_what_a_run_cannot_go_on_from_exactly_is_no_aim(tmp_path):
    _, trainer = spiking(tmp_path, steps=6)
    trainer.run()
    for step, key in ((4, "no_save_rng"), (6, "no_save_optim")):
        shutil.rmtree(tmp_path / f"global_step{step}")
        trainer = trainer_of([Checkpointer(tmp_path, {})], train_iters=step, save=str(tmp_path), **{key: True})
        trainer.step = step - 1
        trainer.run()
    assert choose_rewind(tmp_path, 9, 9, 0).to == 2
