"""When checkpoints are written and deleted; real folders, the engine of the checkpoint tests."""

from __future__ import annotations

import json

import pytest

from megatron.callbacks.checkpointer import Checkpointer
from megatron.callbacks.skipped_steps import SkippedSteps
from tests.callbacks.fakes import Log, out, trainer_of

pytestmark = pytest.mark.cpu


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
    return log.saved_, sorted(int(path.name.removeprefix("global_step")) for path in folder.glob("global_step*"))


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


def test_stopping_saves_where_it_stops(tmp_path):
    assert run(tmp_path, stop_at=7, checkpoint_factor=5)[0] == [5, 7]


def test_what_was_loaded_is_not_written_again(tmp_path):
    assert run(tmp_path, start=10, checkpoint_factor=5)[0] == []
    assert run(tmp_path, start=5, checkpoint_factor=5, extra_save_iters=[0])[0] == [10]


def test_old_checkpoints_go_and_chosen_ones_stay(tmp_path):
    saved, left = run(tmp_path, checkpoint_factor=2, keep_last_n_checkpoints=2, extra_save_iters=[3])
    assert saved == [2, 3, 4, 6, 8, 10] and left == [3, 8, 10]


def test_nothing_is_saved_in_a_streak_of_skipped_updates(tmp_path):
    bad = out(float("nan"), float("nan"), skipped=True)
    assert run(tmp_path, [out(), out(), out(), bad, bad, out()], checkpoint_factor=2, train_iters=6)[0] == [2, 6]
    ends_badly = run(tmp_path / "b", [out(), out(), bad], checkpoint_factor=2, train_iters=3)
    assert ends_badly == ([2], [2])


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
