"""Mixtures in whole runs: phases, sources added on the way, caps, validation sets with names. Known-faults 5, 58."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from megatron.data.tokens.indexed import IndexedDataset
from tests.training.runs import corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

PHASES = [[0, [2, 1, 0]], [2, [1, 0, 0]], [4, [0, 1, 2]]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Prefixes of three data sets of different documents, and of one to validate on."""
    folder = tmp_path_factory.mktemp("sources")
    return [corpus(folder / name, seed) for name, seed in (("a", 1), ("b", 2), ("c", 3), ("v", 4))]


def keys(paths, **more):
    return {"train_data_paths": paths[:3], "train_data_weights": PHASES, "train_data_names": ["a", "b", "c"], **more}


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_straight_is_stop_and_resume_across_phases(tmp_path, paths, stop):
    """At a border, inside a phase, and on another layout from there on."""
    straight = run(keys(paths))[0]
    save = str(tmp_path / "save")
    stopped = run(keys(paths, save=save, checkpoint_factor=1, exit_interval=stop))[0]
    assert stopped.tokens[:stop] == straight.tokens[:stop] and stopped.steps[-1] == stop
    resumed = run(keys(paths, save=save))[0]
    assert resumed.steps[0] == stop + 1
    assert resumed.tokens == straight.tokens[stop:] and resumed.loss == straight.loss[stop:]
    elsewhere = run(keys(paths, load=save, iteration=stop), Layout(dp=2, micro=1))
    together = [sorted(a + b) for a, b in zip(*(report.tokens for report in elsewhere), strict=True)]
    assert together == [sorted(step) for step in straight.tokens[stop:]]


def test_a_source_is_added_to_a_resumed_run(tmp_path, paths):
    """What was read stays read; the new source is drawn from at once; nothing comes twice."""
    save, going_on = str(tmp_path / "save"), {"train_iters": 9, "override_lr_scheduler": True}
    two = {"train_data_paths": paths[:2], "train_data_weights": [1, 1]}
    first = run({**two, "save": save})[0]
    three = {"train_data_paths": [paths[2], *paths[:2]], "train_data_weights": [[0, [0, 1, 1]], [6, [2, 1, 1]]]}
    more = run({**three, **going_on, "save": save})[0]
    assert not more.error and more.steps == [7, 8, 9]
    as_before = run({**two, **going_on, "load": save, "iteration": 6})[0]
    read = [sample for step in first.tokens + more.tokens for sample in step]
    assert len(set(read)) == len(read) == 9 * 8
    old = {sample for step in as_before.tokens for sample in step}
    assert len({sample for step in more.tokens for sample in step} & old) == 12  # half of 24 are of the new source


def test_the_past_is_not_changed(tmp_path, paths, capsys):
    save = str(tmp_path / "save")
    run(keys(paths, save=save, exit_interval=3, checkpoint_factor=1))
    changed = [[0, [1, 1, 0]], *PHASES[1:]]
    for report in run(keys(paths, save=save, train_data_weights=changed), Layout(dp=2)):
        assert report.exit_code == 2
        assert re.search(r"steps 0 to 1: a 0\.6667 .*\b0\.5 now, b 0\.3333 .*\b0\.5 now", report.error)
    gone = {"train_data_paths": [paths[0], paths[2]], "train_data_weights": [1, 0], "train_data_names": ["a", "c"]}
    assert " 2 sources" in run({**gone, "save": save})[0].error
    new_run = run({**gone, "load": save, "finetune": True})[0]
    assert new_run.exit_code == 0 and new_run.steps[0] == 1


def test_too_many_epochs_are_refused_or_made_up_for(paths):
    capped = keys(paths, train_data_max_epochs=[None, 0.01, None])
    report = run(capped)[0]
    assert report.exit_code == 2 and "b: " in report.error and "train_iters" in report.error
    assert run({**capped, "train_data_on_cap": "redistribute"})[0].exit_code == 0


def test_epochs_of_a_mixture_become_steps(paths, capsys):
    """One pass over what is trained on; the source without weight is validated on."""
    weights = {"train_data_weights": [1, 1, 0], "train_iters": None, "train_epochs": 1, "log_interval": 100}
    report = run(keys(paths, **weights, eval_iters=1))[0]
    samples = sum((IndexedDataset(path).num_tokens - 1) // 16 for path in paths[:2])
    assert report.exit_code == 0 and len(report.steps) == samples // 8
    assert {split for _, split, _ in report.evaluated} == {"validation/c"}


STILL = {"optimizer": {"type": "Adam", "params": {"lr": 1e-30}}, "min_lr": 0, "train_iters": 1, "weight_decay": 0}


@pytest.fixture(scope="module")
def losses(paths):
    """The validation losses of the initial weights: for every set and tag, whole, one batch of 2 after the other."""
    sets = {"v": {"path": paths[3], "tags": ["x"]}, "deep/a": {"path": paths[0], "tags": ["x", "y"]}}
    base = {"train_data_paths": paths[:1], "valid_sets": sets, "eval_iters": 1000, **STILL}
    found = {split: metrics for _, split, metrics in run({**base, "train_batch_size": 2})[0].evaluated}
    return base, found


def test_sets_and_tags_are_reported_under_their_names(losses, tmp_path, capsys):
    base, found = losses
    assert list(found) == ["validation/v", "validation/deep/a", "validation/x", "validation/y"]
    v, a, x, y = (metrics["lm_loss"] for metrics in found.values())
    assert v != a and y == a and min(v, a) < x < max(v, a)
    assert found["validation/x"]["lm_loss_macro"] == pytest.approx((v + a) / 2)
    assert found["validation/v"]["lm_loss_ppl"] == pytest.approx(math.exp(v))
    run({**base, "save": str(tmp_path / "s"), "eval_iters": 2})
    lines = [json.loads(line) for line in (tmp_path / "s" / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line if name.startswith("validation/")}
    assert {f"validation/{name}/lm_loss" for name in ("v", "deep/a", "x", "y")} <= names
    assert " validation/v results at the end of training for val data | lm_loss value: " in capsys.readouterr().out


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, micro=1), Layout(pp=2), Layout(dp=2, zero=1)], ids=str)
def test_the_loss_of_a_set_does_not_depend_on_batches(losses, layout):
    """Batches of 8 and of 24 leave the last one partly empty: nothing counts twice, nothing is left out."""
    base, found = losses
    for batch in (8, 24):
        for report in run({**base, "train_batch_size": batch}, layout):
            got = {split: metrics["lm_loss"] for _, split, metrics in report.evaluated}
            assert got == {split: pytest.approx(metrics["lm_loss"], rel=1e-6) for split, metrics in found.items()}


def test_a_named_mixture_in_a_real_run(tmp_path, paths):
    """As `deepy.py` hands it over: the mapping in the resolved config."""
    mixture = {
        "sources": {"a": Path(paths[0]).parent.name + "/text_document", "b": {"path": paths[1], "max_epochs": 1}},
        "weights": [[0, {"a": 1}], [3, {"a": 1, "b": 1}]],
        "valid_sets": {"v": paths[3]},
    }
    root = str(Path(paths[0]).parents[1])
    named = run({"mixture": mixture, "data_root": root, "eval_iters": 1})[0]
    flat = {"train_data_paths": paths[:2], "train_data_weights": [[0, [1, 0]], [3, [1, 1]]]}
    assert named.tokens == run({**flat, "train_data_max_epochs": [None, 1]})[0].tokens
    assert [split for _, split, _ in named.evaluated] == ["validation/v"]
