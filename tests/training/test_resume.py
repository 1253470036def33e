"""Straight run = stop + resume, bit for bit: data, learning rate, loss, gradient norm, weights and moments.

Whole runs, through `callbacks.run.train`. Known-faults 4, 5, 20, 22, 38, 39.
"""

from __future__ import annotations

import json
import math
import re

import pytest

from tests.training.runs import KEYS, corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
BF16 = {"precision": "bfloat16"}
EXACT = [
    (Layout(dp=2, zero=1), DROPOUT),
    (Layout(pp=2, tp=2, sequence_parallel=True), DROPOUT),
    (Layout(pp=2), {**BF16, **DROPOUT}),
]
EXACT_MORE = [
    (Layout(), DROPOUT),
    (Layout(tp=2), DROPOUT),
    (Layout(pp=2, dp=2, zero=1, micro=1), DROPOUT),
    (Layout(pp=2, micro=1), {"no_weight_tying": True, **DROPOUT}),
    (Layout(dp=2, zero=2), DROPOUT),
    (Layout(dp=2, zero=3), DROPOUT),
    (Layout(dp=2, zero=2), BF16),
    (Layout(dp=2, tp=2, zero=3), BF16),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


def expected_lr(step):
    """Of the update after `step` completed ones: warm-up over 4 of 20 steps, cosine to 1e-4 (as GPT-NeoX)."""
    if step <= 4:
        return 1e-3 * max(1, step) / 4
    return 1e-4 + (1e-3 - 1e-4) / 2 * (1 + math.cos(math.pi * (step - 4) / 16))


def check_exact(tmp_path, data, layout, keys):
    keys = {**keys, "data_path": data}
    straight = run({**keys, "save": str(tmp_path / "a")}, layout)
    again = {"load": str(tmp_path / "a"), "iteration": 3, "save": str(tmp_path / "b")}
    resumed = run({**keys, **again}, layout)
    for before, after in zip(straight, resumed, strict=True):
        assert not before.error and not after.error
        assert before.steps == [1, 2, 3, 4, 5, 6] and after.steps == [4, 5, 6]
        assert after.tokens[:3] == before.tokens[3:6]
        assert after.loss == before.loss[3:] and after.grad_norm == before.grad_norm[3:]
        assert after.lr == before.lr[3:] == [expected_lr(step) for step in (3, 4, 5)]
        assert before.state and after.state == before.state
        assert len(set(before.loss)) == 6


@pytest.mark.parametrize(("layout", "keys"), EXACT, ids=str)
def test_resume_is_bit_exact(tmp_path, data, layout, keys):
    check_exact(tmp_path, data, layout, keys)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "keys"), EXACT_MORE, ids=str)
def test_resume_is_bit_exact_at_more_layouts(tmp_path, data, layout, keys):
    check_exact(tmp_path, data, layout, keys)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data):
    """(report of a run of six steps without a checkpoint, folder of the same run stopped at step 3)."""
    folder = tmp_path_factory.mktemp("stopped") / "save"
    whole = run({"data_path": data})[0]
    stopped = run({"data_path": data, "save": str(folder), "checkpoint_factor": 2, "exit_interval": 3})[0]
    assert stopped.steps == [1, 2, 3] and stopped.loss == whole.loss[:3] and stopped.exit_code == 0
    assert sorted(path.name for path in folder.glob("global_step*")) == ["global_step2", "global_step3"]
    return whole, folder


def from_(folder, tmp_path, data, **keys):
    return {"data_path": data, "load": str(folder), "save": str(tmp_path / "new"), **keys}


def test_a_stopped_run_is_resumed_bit_for_bit(tmp_path, data, straight):
    whole, folder = straight
    resumed = run(from_(folder, tmp_path, data))[0]
    assert (resumed.loss, resumed.state) == (whole.loss[3:], whole.state)
    assert [step for step, _ in resumed.logged] == [4, 5, 6]
    assert "loss/init" not in resumed.logged[0][1] and "loss/init" in whole.logged[0][1]


@pytest.mark.parametrize("layout", [Layout(pp=2, tp=2), Layout(dp=2, micro=1, zero=2)], ids=lambda x: x.name)
def test_resume_at_another_layout_gives_the_same_losses(tmp_path, data, straight, layout):
    whole, folder = straight
    for report in run(from_(folder, tmp_path, data), layout):
        assert report.loss == pytest.approx(whole.loss[3:], rel=1e-5)
        assert report.grad_norm == pytest.approx(whole.grad_norm[3:], rel=1e-4)
        assert report.lr == whole.lr[3:]


def test_the_iteration_asked_for_is_loaded(tmp_path, data, straight):
    whole, folder = straight
    report = run(from_(folder, tmp_path, data, iteration=2))[0]
    assert report.steps == [3, 4, 5, 6] and report.loss == whole.loss[2:]
    missing = run(from_(folder, tmp_path / "other", data, iteration=1))[0]
    assert missing.exit_code == 2 and re.search(r"iteration 1 in .*\[2, ", missing.error)
    assert "2, 3" in missing.error and missing.steps == []


def test_a_missing_checkpoint_is_an_error_and_never_new_weights(tmp_path, data):
    report = run({"data_path": data, "load": str(tmp_path / "nothing"), "save": str(tmp_path / "new")})[0]
    assert report.exit_code == 2 and "nothing" in report.error and report.steps == []


def test_finetune_takes_the_weights_and_starts_at_step_0(tmp_path, data, straight):
    whole, folder = straight
    report = run(from_(folder, tmp_path, data, finetune=True, train_iters=2, extra_save_iters=[0]))[0]
    assert report.steps == [1, 2] and report.lr == whole.lr[:2] and report.tokens[0] == whole.tokens[0]
    assert report.loss[0] != whole.loss[0]  # trained weights
    assert (tmp_path / "new" / "global_step0" / "manifest.json").is_file()


def test_a_longer_run_keeps_the_order_of_its_past(tmp_path, data, straight):
    """40 steps draw the data more than twice: built anew, it would come in another order (41 % repeats)."""
    whole, folder = straight
    longer = {"train_iters": 40, "exit_interval": 6}
    resumed = run(from_(folder, tmp_path, data, **longer))[0]
    assert resumed.steps == [4, 5, 6] and resumed.loss == whole.loss[3:]
    assert resumed.tokens[:3] == whole.tokens[3:6]
    anew = run({"data_path": data, "train_iters": 40, "exit_interval": 1})[0]
    assert anew.tokens[0] != whole.tokens[0]


def test_schedule_must_agree_with_the_checkpoint_or_say_who_wins(tmp_path, data, straight):
    whole, folder = straight
    other = {"optimizer": {**KEYS["optimizer"], "params": {**KEYS["optimizer"]["params"], "lr": 2e-3}}}
    refused = run(from_(folder, tmp_path, data, **other))[0]
    assert refused.exit_code == 2 and refused.steps == []
    assert re.search(r"\blr: 0\.001 .*now 0\.002\b", refused.error)
    assert "use_checkpoint_lr_scheduler" in refused.error and "override_lr_scheduler" in refused.error
    kept = run(from_(folder, tmp_path / "kept", data, **other, use_checkpoint_lr_scheduler=True))[0]
    assert kept.lr == whole.lr[3:] and kept.loss == whole.loss[3:]
    manifest = json.loads((tmp_path / "kept" / "new" / "global_step6" / "manifest.json").read_text())
    assert manifest["config"]["lr"] == 1e-3  # and so the next start sees what was used
    taken = run(from_(folder, tmp_path / "taken", data, **other, override_lr_scheduler=True))[0]
    floor = 1e-4
    assert taken.lr[0] == pytest.approx(2e-3 * 3 / 4)
    assert taken.lr[-1] == pytest.approx(floor + (2e-3 - floor) / 2 * (1 + math.cos(math.pi / 16)))


def test_no_steps_to_train_evaluates_what_is_loaded(tmp_path, data, straight):
    _, folder = straight
    keys = {"eval_iters": 2, "eval_interval": 2}
    trained = run({"data_path": data, "train_iters": 3, "lr_decay_iters": 20, **keys})[0]
    report = run({"data_path": data, "load": str(folder), "train_iters": 0, **keys})[0]
    assert report.exit_code == 0 and report.steps == []
    assert [(step, split) for step, split, _ in report.evaluated] == [(3, "validation"), (3, "test")]
    assert report.evaluated[1] == trained.evaluated[-1]


@pytest.mark.parametrize(("batch", "layout"), [(4, Layout(dp=2, micro=1)), (2, Layout()), (16, Layout(dp=2, zero=1))])
def test_a_resumed_run_may_have_another_batch_size(tmp_path, data, straight, batch, layout):
    """Known-fault 5: the samples go on where they were, each once, whatever batch and data-parallel size are now."""
    whole, folder = straight
    reports = run(from_(folder, tmp_path, data, train_batch_size=batch, train_iters=20, exit_interval=6), layout)
    dp, steps = layout.dp, [report.tokens for report in reports]
    # Micro-batch m of a rank holds the samples [(m * dp + rank) * micro, ...) of the step.
    order = [
        sample
        for step in zip(*steps, strict=True)
        for m in range(batch // dp // layout.micro)
        for rank in range(dp)
        for sample in step[rank][m * layout.micro : (m + 1) * layout.micro]
    ]
    assert [report.error for report in reports] == [""] * dp
    expected = [sample for step in whole.tokens[3:6] for sample in step]
    wanted = min(len(expected), 3 * batch)
    assert order[:wanted] == expected[:wanted] and reports[0].lr == whole.lr[3:6]


def test_small_batches_after_large_ones_do_not_run_out_of_samples(tmp_path, data):
    """96 of an epoch's 146 samples are used; 9 more steps of 8 need 72, although 12 steps of 8 are only 96."""
    keys = {"data_path": data, "save": str(tmp_path / "save")}
    assert run({**keys, "train_batch_size": 32, "train_iters": 3})[0].exit_code == 0
    report = run({**keys, "train_batch_size": 8, "train_iters": 12})[0]
    assert report.exit_code == 0 and report.steps == list(range(4, 13))
