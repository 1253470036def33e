"""Steps that must not count: gradients that are not finite, batches with nothing to train on. Known-faults 46, 47."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from tests.training.runs import Faults, corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

LAYOUTS = [Layout(pp=2), Layout(dp=2, zero=1)]
MORE = [Layout(), Layout(tp=2), Layout(dp=2, zero=2), Layout(dp=2, zero=3), Layout(pp=2, dp=2, zero=1)]
LAYOUTS += [pytest.param(layout, marks=pytest.mark.slow) for layout in MORE]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


def steps_in(folder):
    return sorted(int(path.name.removeprefix("global_step")) for path in folder.glob("global_step*"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
def test_a_streak_of_nan_gradients_ends_the_run_and_leaves_the_last_good_checkpoint(tmp_path, data, layout):
    save = tmp_path / "save"
    keys = {"data_path": data, "save": str(save), "checkpoint_factor": 1, "max_skipped_steps": 2}
    for report in run(keys, layout, Faults(nan_gradients=(4, 5))):
        assert report.exit_code == 4
        assert re.search(r"\b2 updates .*iteration 5\b", report.error)
        assert f"Last finite loss: {report.loss[2]:.4f}" in report.error
        assert report.skipped == [False, False, False, True, True]
        assert not math.isfinite(report.grad_norm[3])
    # After 3 no step was taken: whether its weights are good is known of those of 2 only.
    assert steps_in(save) == [1, 2, 3, 4] and (save / "latest").read_text().strip() == "global_step2"
    status = json.loads((save / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 4, 5)
    # Started again without the fault, the run goes on as if it had not been.
    straight = run({"data_path": data}, layout)
    for again, whole in zip(run(keys, layout), straight, strict=True):
        assert again.steps == [3, 4, 5, 6] and again.loss == whole.loss[2:] and again.state == whole.state


def test_a_streak_that_is_known_a_step_late_ends_the_run_at_the_last_good_checkpoint(tmp_path, data):
    """As on an accelerator: that step 5 was skipped is known when step 6 is under way."""
    save, layout = tmp_path / "save", Layout(dp=2, zero=1)
    keys = {"data_path": data, "save": str(save), "precision": "bfloat16"}
    keys = {**keys, "checkpoint_factor": 2, "max_skipped_steps": 2, "log_interval": 3}
    for report in run(keys, layout, Faults(nan_gradients=(4, 5), late=True)):
        assert report.exit_code == 4 and re.search(r"\b2 updates .*iteration 5\b", report.error)
        assert f"Last finite loss: {report.loss[2]:.4f}" in report.error
        assert (report.steps, report.skipped) == ([1, 2, 3, 4, 5], [False] * 3 + [True] * 2)
        assert [step for step, _ in report.logged] == [3]
    assert steps_in(save) == [2, 4] and (save / "latest").read_text().strip() == "global_step2"
    # A checkpoint knows of all its steps: written at 4, it has the first of the streak.
    state = torch.load(save / "global_step4" / "mp_rank_00_model_states.pt", weights_only=True)
    assert state["skipped_steps"] == 1
    status = json.loads((save / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 4, 6)
    straight = run({**keys, "save": None}, layout)
    for again, whole in zip(run(keys, layout, Faults(late=True)), straight, strict=True):
        assert again.exit_code == 0 and again.steps == [3, 4, 5, 6]
        assert again.loss == whole.loss[2:] and again.state == whole.state
        assert again.logged[-1][1]["train/lm_loss"] == whole.logged[-1][1]["train/lm_loss"]


@pytest.mark.parametrize("keys", [{}, {"precision": "bfloat16"}], ids=str)
def test_one_skipped_step_leaves_the_weights_and_moves_the_schedule_on(tmp_path, data, keys):
    save = tmp_path / "save"
    keys = {**keys, "data_path": data, "save": str(save), "checkpoint_factor": 1, "train_iters": 4}
    straight = run({"data_path": data, **keys, "save": None})[0]
    report = run(keys, faults=Faults(nan_gradients=(2, 4)))[0]
    assert report.exit_code == 0 and report.skipped == [False, True, False, True]
    assert report.loss[:2] == straight.loss[:2] and report.loss[2] != straight.loss[2]
    assert report.lr == straight.lr and report.tokens == straight.tokens  # both follow the iteration
    assert steps_in(save) == [1, 2, 3, 4]  # the weights are good, at the last step too
    saved = torch.load(save / "global_step4" / "mp_rank_00_model_states.pt", weights_only=True)
    assert (saved["iteration"], saved["skipped_steps"]) == (4, 2)
    logged = dict(report.logged)
    assert (logged[2]["train/skipped"], logged[2]["train/nan"]) == (1, 1)
    assert (logged[3]["train/skipped"], logged[3]["train/nan"]) == (0, 0)


@pytest.mark.parametrize("lr", [1e30, 1e8])
def test_a_finite_update_that_ruins_the_weights_does_not_replace_the_last_good_checkpoint(tmp_path, data, lr):
    save, layout = tmp_path / "save", Layout(dp=2, zero=1)
    keys = {"data_path": data, "save": str(save), "checkpoint_factor": 1, "keep_last_n_checkpoints": 1}
    assert run({**keys, "exit_interval": 3}, layout)[0].exit_code == 0
    absurd = {
        "optimizer": {"type": "Adam", "params": {"lr": lr}},
        "override_lr_scheduler": True,
        "max_skipped_steps": 2,
    }
    for report in run({**keys, **absurd}, layout):
        assert report.exit_code == 4 and math.isfinite(report.grad_norm[0]), report.error
    assert 3 in steps_in(save) and (save / "latest").read_text() == "global_step3"
    straight = run({"data_path": data}, layout)
    for again, whole in zip(run({**keys, "override_lr_scheduler": True}, layout), straight, strict=True):
        assert again.steps == [4, 5, 6] and again.loss == whole.loss[3:] and again.state == whole.state
    assert steps_in(save) == [6]


def test_a_step_without_trained_tokens_is_skipped_and_reported(data):
    keys = {"data_path": data, "train_iters": 4, "max_skipped_steps": 1}
    reports = run(keys, Layout(pp=2), Faults(all_masked=(2, 3)))
    for report in reports:
        assert report.exit_code == 0 and report.skipped == [False, True, True, False]
        assert report.loss[1:3] == [0.0, 0.0] and report.grad_norm[1] is None
        assert all(math.isfinite(loss) for loss in report.loss)
        logged = dict(report.logged)
        assert (logged[2]["train/skipped"], logged[2]["train/nan"], logged[2]["train/trained_tokens"]) == (1, 0, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_corrupted_replica_is_found(data, rank):
    keys = {"data_path": data, "replica_check_interval": 2}
    for report in run(keys, Layout(dp=2), Faults(corrupt_weight=(rank, 4))):
        assert report.exit_code == 4 and report.steps == [1, 2, 3, 4]
        assert "data-parallel replicas differ at iteration 4" in report.error
        assert "0.word_embeddings.weight" in report.error
    off = run({**keys, "replica_check_interval": 0, "train_iters": 4}, Layout(dp=2), Faults(corrupt_weight=(rank, 4)))
    assert [report.exit_code for report in off] == [0, 0]
