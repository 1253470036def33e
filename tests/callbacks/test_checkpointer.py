"""When checkpoints are written and deleted; real folders, the engine of the checkpoint tests."""

from __future__ import annotations

import json
import math
import shutil
import signal

import pytest
import torch

from megatron.callbacks.checkpointer import Checkpointer, config_texts
from megatron.callbacks.exit_interval import ExitInterval
from megatron.callbacks.skipped_steps import SkippedSteps
from megatron.callbacks.stop_on_signal import StopOnSignal
from megatron.checkpoint.find import list_checkpoints
from megatron.errors import NumericsError, StopRequested
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import OBJECTIVES
from megatron.run.end import report_stop
from megatron.training.callback import Callback
from tests.callbacks.fakes import GoesBack, Log, out, run_and_go_back, trainer_of
from tests.callbacks.test_stopping import SendsItself

pytestmark = pytest.mark.cpu


def on_disk(folder):
    return sorted(int(path.name.removeprefix("global_step")) for path in folder.glob("global_step*"))


def run(folder, outs=(), start=0, stop_at=None, **keys):
    """(steps saved, in order; steps on disk)."""
    log = Log()

    class Stop(Log):
        def after_step(self, trainer, out):
            if trainer.step == stop_at:
                trainer.request_stop("enough")

    trainer = trainer_of([SkippedSteps(0), Stop(), Checkpointer(folder, {"run.yml": "a: 1\n"}), log], outs, **keys)
    trainer.step = start
    trainer.run()
    return log.saved_, on_disk(folder)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"checkpoint_factor": 4}, [4, 8, 10]),
        ({"checkpoint_factor": 5}, [5, 10]),
        ({"checkpoint_factor": 2, "checkpoint_scale": "log"}, [1, 2, 4, 8, 10]),
        ({"extra_save_iters": [0, 3]}, [0, 3, 10]),
        ({"checkpoint_factor": 0}, [10]),
        ({"checkpoint_factor": -1}, [10]),
        ({}, [10]),
    ],
    ids=str,
)
def test_cadence(tmp_path, keys, expected):
    assert run(tmp_path, **keys) == (expected, expected)


def test_what_a_run_that_goes_on_from_an_earlier_one_leaves_behind_is_not_resumed_from(tmp_path):
    run(tmp_path, extra_save_iters=[4, 5])
    assert run(tmp_path, start=4, train_iters=4) == ([], [4, 5, 10]) and list_checkpoints(tmp_path).latest == 10
    assert run(tmp_path, start=4, train_iters=6) == ([6], [4, 5, 6, 10])
    shutil.rmtree(tmp_path / "global_step6")
    assert list_checkpoints(tmp_path).latest == 4


def test_files_of_one_name_are_all_kept_with_the_checkpoint(tmp_path):
    texts = {"a/run.yml": "num_layers: 2\n", "b/run.yml": "hidden_size: 16\n", "mine/resolved.yml": "seed: 7\n"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    found = config_texts(NeoXArgs.from_files([str(tmp_path / name) for name in texts]))
    assert sorted(found.values()) == sorted(texts.values()) and "resolved.yml" not in found
    assert found["run.yml"] == texts["a/run.yml"] and found["b-run.yml"] == texts["b/run.yml"]


def test_stopping_saves_where_it_stops(tmp_path):
    assert run(tmp_path, stop_at=7, checkpoint_factor=5)[0] == [5, 7]


def test_what_was_loaded_is_not_written_again(tmp_path):
    assert run(tmp_path, start=10, checkpoint_factor=5)[0] == []
    assert run(tmp_path, start=5, checkpoint_factor=5, extra_save_iters=[0])[0] == [10]


def test_old_checkpoints_go_and_chosen_ones_stay(tmp_path):
    saved, left = run(tmp_path, checkpoint_factor=2, keep_last_n_checkpoints=2, extra_save_iters=[3])
    assert saved == [2, 3, 4, 6, 8, 10] and left == [3, 8, 10]


BAD = out(float("nan"), float("nan"), skipped=True)


@pytest.mark.parametrize(
    ("keys", "saved"),
    [
        ({"checkpoint_factor": 2}, [2, 4, 5]),
        ({"checkpoint_factor": 3}, [3, 5]),
        ({"extra_save_iters": [4]}, [4, 5]),
        ({"exit_interval": 4}, [4]),
    ],
    ids=str,
)
def test_a_skipped_update_is_no_reason_not_to_save(tmp_path, keys, saved):
    log, outs = Log(), [out(), out(), BAD, BAD, BAD]
    interval = ExitInterval(keys.get("exit_interval"))
    trainer = trainer_of([SkippedSteps(0), interval, Checkpointer(tmp_path, {}), log], outs, train_iters=5, **keys)
    trainer.run()
    assert log.saved_ == saved


def test_a_signal_during_skipped_steps_saves_and_gives_code_3(tmp_path):
    """As fp16 begins: every update overflows until the loss scale fits."""
    terminate = SendsItself(signal.SIGTERM, 3)
    trainer = trainer_of([StopOnSignal(), terminate, SkippedSteps(0), Checkpointer(tmp_path, {})], [BAD] * 10)
    trainer.run()
    assert on_disk(tmp_path) == [3]
    with pytest.raises(StopRequested) as error:
        report_stop(trainer)
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    ("outs", "left"),
    [
        ([out()] * 6, [6]),
        ([out()] * 3 + [BAD] * 3, [2, 6]),  # the third update may have ruined the weights: 2 is known to be good
        ([out()] * 3 + [BAD] * 2 + [out()], [6]),
        ([out()] * 3 + [out(500.0)] * 3, [2, 6]),  # all is finite, but an untrained model has 2.0
        ([out()] * 3 + [out(500.0), out(), out()], [6]),
        ([out(0.01)] * 3 + [out(9.0)] * 3, [6]),  # much worse, but no worse than a loss may be
        ([BAD] * 6, [6]),
    ],
    ids=["good", "streak", "streak that ends", "absurd", "absurd once", "much worse", "never an update"],
)
def test_the_last_checkpoint_known_to_be_good_is_not_deleted(tmp_path, outs, left):
    assert run(tmp_path, outs, train_iters=6, checkpoint_factor=1, keep_last_n_checkpoints=1)[1] == left


def test_a_loss_that_is_no_cross_entropy_may_be_of_any_size(tmp_path, caplog):
    """As that of completions, whose advantages make it 0 in one step and large in the next; it must be finite."""
    saver = Checkpointer(tmp_path, {})
    trainer = trainer_of(
        [saver], [out(0.0), out(), out(500.0), out(-500.0), out(math.nan)], train_iters=5, checkpoint_factor=1
    )
    trainer.engine.objective = OBJECTIVES["reinforce"]()
    trainer.run()
    assert saver.good == 3 and "ruined" in caplog.text and "more than" not in caplog.text


def test_a_checkpoint_that_is_written_again_after_going_back_is_judged_again(tmp_path):
    """Step 5 says that the weights of 4 are ruined; after going back to 2 it says that those of the new 4 are good."""
    saver, outs = Checkpointer(tmp_path, {}), [*[out()] * 4, out(500.0), *[out()] * 3, BAD]
    run_and_go_back(trainer_of([saver, GoesBack(5)], outs, train_iters=6, checkpoint_factor=2), 2)
    assert saver.good == 4


def test_what_is_known_to_be_good_survives_a_restart(tmp_path):
    keys = {"checkpoint_factor": 1, "keep_last_n_checkpoints": 1}
    first = Checkpointer(tmp_path, {})
    trainer_of([first], [out()] * 3 + [BAD] * 2, train_iters=5, **keys).run()
    assert on_disk(tmp_path) == [2, 5]
    again = Checkpointer(tmp_path, {})
    again.load_state_dict(first.state_dict())
    trainer = trainer_of([again], [BAD, out(), out()], train_iters=8, **keys)
    trainer.step, left = 5, []

    class Look(Callback):
        def after_step(self, trainer, out):
            left.append(on_disk(tmp_path))

    trainer.callbacks.append(Look())
    trainer.run()
    assert left == [[2, 6], [6, 7], [7, 8]] and on_disk(tmp_path) == [8]


def test_bad_numbers_end_a_run_at_the_last_good_checkpoint(tmp_path):
    with pytest.raises(NumericsError):
        callbacks = [SkippedSteps(3), Checkpointer(tmp_path, {})]
        trainer_of(callbacks, [out()] * 3 + [BAD] * 3, checkpoint_factor=1, keep_last_n_checkpoints=1).run()
    assert on_disk(tmp_path) == [2, 5] and (tmp_path / "latest").read_text() == "global_step2"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_replace_nothing(tmp_path, value):
    class Ruin(Callback):
        def after_step(self, trainer, out):
            if trainer.step == 4:
                with torch.no_grad():
                    trainer.engine.masters["3.attention.dense.bias"][1] = value

    with pytest.raises(NumericsError, match=r"\b1 parameters .*iteration 4\b.* 3\.attention\.dense\.bias\b") as error:
        trainer_of([Ruin(), Checkpointer(tmp_path, {})], checkpoint_factor=2, keep_last_n_checkpoints=1).run()
    assert error.value.exit_code == 4
    assert on_disk(tmp_path) == [2] and (tmp_path / "latest").read_text() == "global_step2"


def test_an_empty_batch_is_no_streak(tmp_path):
    empty = out(0.0, None, skipped=True, tokens=0)
    assert run(tmp_path, [out(), empty], checkpoint_factor=2, train_iters=2)[0] == [2]


def test_what_a_checkpoint_holds(tmp_path):
    run(tmp_path, train_iters=2, git_hash="abc", checkpoint_factor=2)
    folder = tmp_path / "global_step2"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["consumed"], manifest["git"]) == (2, 8, "abc")
    assert manifest["config"]["lr"] == 0.5 and manifest["config"]["git_hash"] == "abc"
    assert (folder / "configs" / "run.yml").read_text() == "a: 1\n"


@pytest.mark.parametrize(("key", "pattern"), [("no_save_optim", "optim_layer_*"), ("no_save_rng", "rng_rank_*")])
def test_what_is_left_out_on_request(tmp_path, key, pattern):
    for off in (False, True):
        run(tmp_path / str(off), train_iters=1, **{key: off})
        assert bool(list((tmp_path / str(off) / "global_step1").glob(pattern))) is not off
