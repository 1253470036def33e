"""`init_from`: a run that starts from a checkpoint of another, in whole runs (known-faults 5, 18, 22, 38)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.runs import KEYS, Report, corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

BATCH = KEYS["train_batch_size"]
HOLD = {"lr_decay_iters": 20}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Prefixes of three data sets of different documents."""
    folder = tmp_path_factory.mktemp("sources")
    return [corpus(folder / name, seed) for name, seed in (("a", 1), ("b", 2), ("c", 3))]


@pytest.fixture(scope="module")
def phase1(tmp_path_factory: pytest.TempPathFactory, paths: list[str]) -> tuple[Report, str]:
    """(report of a run of 12 steps over two sources, folder of the same run stopped after 4)."""
    folder = str(tmp_path_factory.mktemp("phase1") / "save")
    straight = run({**two(paths), "train_iters": 12, **HOLD})[0]
    stopped = run({**two(paths), "train_iters": 12, **HOLD, "save": folder, "exit_interval": 4, "checkpoint_factor": 2})
    assert stopped[0].steps == [1, 2, 3, 4] and stopped[0].tokens[:4] == straight.tokens[:4]
    return straight, folder


def two(paths: list[str], weights: Any = (2, 1)) -> dict[str, Any]:
    return {"train_data_paths": paths[:2], "train_data_weights": list(weights), "train_data_names": ["a", "b"]}


def three(paths: list[str], weights: Any) -> dict[str, Any]:
    return {"train_data_paths": paths, "train_data_weights": weights, "train_data_names": ["a", "b", "c"]}


def begin(folder: str, tmp_path: Path | None = None, **more: Any) -> dict[str, Any]:
    """Keys of a run that begins from `folder`: what is not a key of a config is one of `init_from`."""
    inner = {name: more.pop(name) for name in ("iteration_", "data", "optimizer_", "step") if name in more}
    init = {"path": folder, **{name.rstrip("_"): value for name, value in inner.items()}}
    return {"init_from": init, **({"save": str(tmp_path / "save")} if tmp_path else {}), **more}


def samples(*reports: Report) -> list[str]:
    return [sample for report in reports for step in report.tokens[: len(report.steps)] for sample in step]


def manifest(save: Path, step: int) -> dict[str, Any]:
    return json.loads((save / f"global_step{step}" / "manifest.json").read_text())


def test_everything_continued_is_the_run_that_never_stopped(paths, phase1, tmp_path, capsys):
    """Bit for bit, with the same configuration; the order of its samples is that of the first run."""
    straight, folder = phase1
    report = run({**two(paths), **HOLD, **begin(folder, tmp_path, train_iters=12)})[0]
    assert not report.error and report.steps == list(range(5, 13))
    assert samples(report) == samples(straight)[4 * BATCH :] and report.loss == straight.loss[4:]
    assert report.lr == straight.lr[4:] and report.state == straight.state
    shown = capsys.readouterr().out
    assert re.search(r"global_step4 \(init_from\): .*\b32 samples; optimizer kept .*\bstep 4; .*schedule ", shown)


@pytest.mark.parametrize("step", ["continue", "restart"])
@pytest.mark.parametrize("batch", [4, 8, 16])
def test_no_sample_is_repeated_or_skipped(paths, phase1, step, batch):
    """Another batch size, another length and another schedule: the samples go on one by one."""
    straight, folder = phase1
    steps = 48 // batch
    first = 4 if step == "continue" else 0
    more = {"train_batch_size": batch, "train_iters": first + steps, "lr_decay_style": "constant"}
    report = run({**two(paths), **begin(folder, step=step, **more)})[0]
    assert not report.error and report.steps == list(range(first + 1, first + steps + 1))
    assert [sample for step in report.tokens for sample in step] == samples(straight)[32:80]


def test_another_layout_reads_the_same(paths, phase1):
    straight, folder = phase1
    for layout in (Layout(tp=2, pp=2), Layout(dp=2, micro=1, zero=1)):
        reports = run({**two(paths), **HOLD, **begin(folder, train_iters=8, optimizer_="keep")}, layout)
        for report in reports:
            assert report.loss == pytest.approx(straight.loss[4:8], rel=1e-5)
            assert report.grad_norm == pytest.approx(straight.grad_norm[4:8], rel=1e-4)


def test_steps_and_the_learning_rate_follow_the_step(paths, phase1):
    """The schedule is this config's: warmed up anew when steps restart, at its place when they continue."""
    _, folder = phase1
    fresh = run({**two(paths), "train_iters": 10, "lr_decay_iters": 10, "warmup": 0.3, "min_lr": 0})[0]
    schedule = {"train_iters": 10, "warmup": 0.3, "min_lr": 0, "lr_decay_iters": 10}
    again = run({**two(paths), **begin(folder, step="restart", **schedule)})[0]
    assert again.steps == list(range(1, 11)) and again.lr == fresh.lr
    on = run({**two(paths), **begin(folder, **schedule)})[0]
    assert on.steps == list(range(5, 11)) and on.lr == fresh.lr[4:]


def test_the_optimizer_is_kept_or_new(paths, phase1, tmp_path):
    """A step of almost no length shows the moments: kept ones are near those of the checkpoint, new ones are not."""
    _, folder = phase1
    still = {"optimizer": {"type": "Adam", "params": {"lr": 1e-30}}, "min_lr": 0, "weight_decay": 0}
    loaded = run({**two(paths), **still, "override_lr_scheduler": True, "load": folder, "train_iters": 5})[0]
    kept = run({**two(paths), **still, **begin(folder, tmp_path, train_iters=5)})[0]
    new = run({**two(paths), **still, **begin(folder, tmp_path / "new", optimizer_="reset", train_iters=5)})[0]
    assert kept.state == loaded.state and kept.loss == new.loss
    moments = [name for name in kept.state if not name.endswith("/weight")]
    assert moments and all(kept.state[name] != new.state[name] for name in moments)
    counts = [steps_of(tmp_path / "save", 5), steps_of(tmp_path / "new" / "save", 5)]
    assert counts == [5.0, 1.0]
    assert {name: kept.state[name] for name in kept.state if name.endswith("/weight")} == {
        name: new.state[name] for name in new.state if name.endswith("/weight")
    }


def steps_of(save: Path, step: int) -> float:
    from megatron.checkpoint.find import open_checkpoint
    from megatron.checkpoint.reader import CheckpointReader

    return CheckpointReader(open_checkpoint(save / f"global_step{step}")).state()["scalars"]["optimizer_steps"]


def test_another_optimizer_starts_from_zero(paths, phase1):
    _, folder = phase1
    sgd = {"optimizer": {"type": "sgd", "params": {"lr": 1e-3}}, "train_iters": 6}
    refused = run({**two(paths), **begin(folder, **sgd)})[0]
    assert refused.exit_code == 2 and "optimizer: reset}" in refused.error
    assert run({**two(paths), **begin(folder, optimizer_="reset", **sgd)})[0].steps == [5, 6]


@pytest.mark.parametrize("step", ["continue", "restart"])
def test_restarted_data_is_read_as_by_a_fresh_run(paths, phase1, step):
    """In this run's order (its seed), from sample 0, whatever was read; also of other data, in other packing."""
    straight, folder = phase1
    first = 4 if step == "continue" else 0
    more = {"data": "restart", "step": step, "train_iters": first + 6}
    same = run({**two(paths), **begin(folder, **more)})[0]
    assert same.steps[0] == first + 1 and samples(same) == samples(straight)[: 6 * BATCH]
    keys = {"train_data_paths": [paths[2]], "train_data_names": ["c"], "seed": 5, "pack_impl": "best_fit"}
    other = run({**keys, **begin(folder, **more)})[0]
    assert not other.error and samples(other) == samples(run({**keys, "train_iters": 6})[0])


CHANGED = [[0, [1, 1, 2]], [3, [0, 0, 1]]]


@pytest.mark.parametrize("step", ["continue", "restart"])
def test_a_changed_mixture_counts_in_the_steps_of_this_run(paths, phase1, tmp_path, step):
    """What is said of steps before the first one counts from there; every source goes on in its own order."""
    straight, folder = phase1
    first = 4 if step == "continue" else 0
    weights = [[0, [1, 1, 2]], [first + 3, [0, 0, 1]]]
    keys = {**three(paths, weights), **begin(folder, tmp_path, step=step, train_iters=first + 6, checkpoint_factor=1)}
    whole = run(keys)[0]
    assert not whole.error and whole.steps == list(range(first + 1, first + 7))
    read = samples(straight)[:32] + samples(whole)
    assert len(set(read)) == len(read)
    alone = run({"train_data_paths": [paths[2]], "train_iters": 9})[0]
    of_c = [[sample for sample in step if sample in set(samples(alone))] for step in whole.tokens]
    assert [len(step) for step in of_c] == [4, 4, 4, 8, 8, 8]
    # Stop + resume is straight: inside the phase, at its border, and behind it.
    for stop in (1, 3, 4):
        save = str(tmp_path / f"stop{stop}")
        stopped = run({**keys, "save": save, "exit_interval": first + stop})[0]
        resumed = run({**keys, "save": save})[0]
        assert not resumed.error, resumed.error
        assert samples(stopped, resumed) == samples(whole) and resumed.state == whole.state
        assert stopped.loss + resumed.loss == whole.loss and resumed.lr == whole.lr[stop:]


def test_a_source_that_was_read_stays_in_the_list(paths, phase1):
    _, folder = phase1
    gone = {"train_data_paths": [paths[0], paths[2]], "train_data_weights": [1, 1], "train_data_names": ["a", "c"]}
    refused = run({**gone, **begin(folder, train_iters=8)})[0]
    assert refused.exit_code == 2 and "weight 0" in refused.error and "data: restart}" in refused.error
    assert run({**gone, **begin(folder, train_iters=6, data="restart")})[0].exit_code == 0
    assert run({**three(paths, [1, 0, 1]), **begin(folder, train_iters=6)})[0].exit_code == 0


def test_the_weights_of_this_run_s_own_past_cannot_change(paths, phase1, tmp_path):
    _, folder = phase1
    keys = begin(folder, tmp_path, train_iters=8, exit_interval=6, checkpoint_factor=1)
    assert run({**three(paths, [1, 1, 2]), **keys})[0].steps == [5, 6]
    refused = run({**three(paths, [1, 1, 1]), **keys})[0]
    assert refused.exit_code == 2 and "steps 4 to 5: " in refused.error
    written = re.search(r"write (\[\[.*?\]\]\])", refused.error)[1]
    assert written == "[[0, [0.25, 0.25, 0.5]], [6, [0.333333, 0.333333, 0.333333]]]"
    assert run({**three(paths, json.loads(written)), **keys})[0].steps == [7, 8]


def test_phases_follow_one_another(paths, phase1, tmp_path):
    """A third phase from the second, which counted its steps anew: the samples still go on."""
    straight, folder = phase1
    second = begin(folder, tmp_path, step="restart", train_iters=2, train_batch_size=4)
    assert run({**two(paths), **second})[0].steps == [1, 2]
    for step, first in (("continue", 2), ("restart", 0)):
        third = run({**two(paths), **begin(str(tmp_path / "save"), step=step, train_iters=first + 3)})[0]
        assert third.steps[0] == first + 1 and samples(third) == samples(straight)[40 : 40 + 24]


def test_later_starts_continue_and_remember_where_from(paths, phase1, tmp_path, capsys):
    _, folder = phase1
    keys = {**two(paths), **begin(folder, tmp_path, iteration_=2, train_iters=6, checkpoint_factor=1), **HOLD}
    assert run({**keys, "exit_interval": 4})[0].steps == [3, 4]
    capsys.readouterr()
    again = run(keys)[0]
    assert again.steps == [5, 6]
    assert f"init_from: {folder})" in capsys.readouterr().out
    taken = {"path": folder, "iteration": 2, "data": "continue", "optimizer": "keep", "step": "continue"}
    taken |= {"vocab": "keep", "layer_map": None}
    assert manifest(tmp_path / "save", 6)["config"]["init_from"] == taken
    assert yaml.safe_load((tmp_path / "save" / "resolved.yml").read_text())["init_from"] == taken
    # The latest is written down by its number, so that the record still tells it when more has come.
    run({**keys, **begin(folder, tmp_path / "b", train_iters=6)})
    run({**keys, **begin(folder, tmp_path / "b", train_iters=6)})
    assert yaml.safe_load((tmp_path / "b" / "save" / "resolved.yml").read_text())["init_from"]["iteration"] == 4
    run({**keys, "init_from": {"path": str(tmp_path / "b" / "save")}})
    assert f"this run started from {folder}" in capsys.readouterr().out


def test_random_states_go_with_the_steps(paths, tmp_path):
    """Dropout as in the run that never stopped when steps continue; anew when they restart, or when asked for."""
    keys = {**two(paths), "hidden_dropout": 0.2, "lr_decay_style": "constant"}
    straight = run(keys)[0]
    folder = str(tmp_path / "first")
    run({**keys, "save": folder, "exit_interval": 3})
    assert run({**keys, **begin(folder)})[0].loss == straight.loss[3:]
    for anew in (begin(folder, step="restart", train_iters=3), begin(folder, no_load_rng=True)):
        report = run({**keys, **anew})[0]
        assert report.tokens[:3] == straight.tokens[3:6] and report.loss[0] != straight.loss[3]


def test_dropout_and_half_precision_resume_exactly(paths, phase1, tmp_path):
    _, folder = phase1
    keys = {**two(paths), "hidden_dropout": 0.1, "precision": "bfloat16", "checkpoint_factor": 1}
    for step, first in (("continue", 4), ("restart", 0)):
        inner = {"step": step, "train_iters": first + 4}
        layout = Layout(dp=2, zero=1, micro=1)
        whole = run({**keys, **begin(folder, tmp_path / step, **inner)}, layout)
        save = str(tmp_path / step / "b")
        run({**keys, **begin(folder, **inner), "save": save, "exit_interval": first + 2}, layout)
        resumed = run({**keys, **begin(folder, **inner), "save": save}, layout)
        for one, other in zip(whole, resumed, strict=True):
            assert not one.error and other.loss == one.loss[2:] and other.state == one.state


def test_what_the_checkpoint_cannot_give_is_refused(paths, phase1, tmp_path):
    _, folder = phase1

    def error(**more: Any) -> str:
        report = run({**two(paths), **begin(folder, **{"train_iters": 8, **more})})[0]
        assert report.exit_code == 2 and report.steps == []
        return report.error

    assert "train_iters: 4 is not beyond step 4" in error(train_iters=4)
    assert "use_checkpoint_lr_scheduler" in error(use_checkpoint_lr_scheduler=True)
    assert "complete steps: [2, 4]" in error(iteration_=3)
    assert "data order: seed: 1234" in error(seed=1) and "data: restart}" in error(seed=1)
    assert "architecture: activation" in error(activation="geglu")
    bare = str(tmp_path / "bare")
    assert run({**two(paths), "save": bare, "train_iters": 2, "no_save_optim": True})[0].exit_code == 0
    keys = {**two(paths), "train_iters": 4}
    assert "init_from.optimizer=reset" in run({**keys, **begin(bare)})[0].error
    assert run({**keys, **begin(bare, optimizer_="reset")})[0].steps == [3, 4]
