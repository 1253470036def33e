"""`skip_outliers`: steps far outside those before leave the weights alone, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.training.outliers import Outliers, Window
from tests.training.runs import Faults, corpus, run
from tests.training.test_precision import fp16_keys, run_fp16
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

# From the fifth step on; the deviations of a run that goes well are far below.
SKIP = {"skip_outliers": {"window": 8, "sigma": 20}}
BF16 = {"precision": "bfloat16"}
LAYOUTS = [
    (Layout(dp=2, zero=1), BF16),
    (Layout(pp=2, tp=2), {}),
    (Layout(dp=2, zero=1, engine="native"), BF16),
    pytest.param(Layout(), {}, marks=pytest.mark.slow),
    pytest.param(Layout(dp=2, zero=2), {}, marks=pytest.mark.slow),
    pytest.param(Layout(dp=2, zero=3), {}, marks=pytest.mark.slow),
    pytest.param(Layout(pp=2, dp=2, zero=1), BF16, marks=pytest.mark.slow),
    pytest.param(Layout(), {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("window", [4, 9])
def test_limits_are_those_of_numpy(window):
    rng, found, kept = np.random.RandomState(window), Outliers(window, 2.0, "cpu"), []
    saved, seen = None, []
    for step in range(60):
        now = (rng.randn(2) + [3, 10]) * (5 if rng.rand() < 0.1 else 1)
        if step == 20:
            now[0] = np.nan
        now = now.astype(np.float32)
        before = np.array(kept[-window:], dtype=np.float64)
        expected = False
        if len(before) >= max(2, window // 2) and np.isfinite(now).all():
            expected = bool((now > before.mean(0) + 2.0 * before.std(0, ddof=1)).any())
        if step == 30:  # another process goes on
            saved, found = found.state(), Outliers(window, 2.0, "cpu")
            found.load(saved)
        assert bool(found.judge(*torch.tensor(now))) is expected, step
        seen.append(expected)
        if np.isfinite(now).all():
            kept.append(now.astype(np.float64))
    assert 5 < sum(seen) < 55 and not any(seen[: window // 2])
    assert saved == {
        "loss": [row[0] for row in kept[:29]][-window:],
        "grad_norm": [row[1] for row in kept[:29]][-window:],
    }


def test_a_window_takes_what_one_of_another_size_saved():
    small, large = Window(3, 1.0, 1), Window(8, 1.0, 1)
    for one in (small, large):
        one.load([[1.0, 2.0, 3.0, 4.0, 5.0]])
    assert small.state() == [[3.0, 4.0, 5.0]] and large.state() == [[1.0, 2.0, 3.0, 4.0, 5.0]]
    assert small.limits().tolist() == [pytest.approx(5.0)]  # 4 + 1
    large.load([[]])
    assert large.limits().tolist() == [float("inf")]


@pytest.mark.parametrize(("layout", "keys"), LAYOUTS, ids=lambda x: getattr(x, "name", None))
def test_an_outlier_is_skipped_and_without_one_nothing_changes(data, layout, keys):
    keys = {**keys, "data_path": data, "max_skipped_steps": 1}
    plain = run(keys, layout)
    watched = run({**keys, **SKIP}, layout)
    skipped = run({**keys, **SKIP}, layout, Faults(huge_gradients=(6,)))
    # What is not finite is skipped too: in the same step, and so with the same weights.
    as_if = run({**keys, "max_skipped_steps": 0}, layout, Faults(nan_gradients=(6,)))
    for before, after in zip(plain, watched, strict=True):
        assert before.state and after.state == before.state and after.loss == before.loss
    for outlier, infinite in zip(skipped, as_if, strict=True):
        assert outlier.exit_code == 0 and outlier.skipped == infinite.skipped == [False] * 5 + [True]
        assert outlier.state == infinite.state != plain[0].state
        logged = [metrics["optim/step_skipped"] for _, metrics in outlier.logged]
        assert logged == [0, 0, 0, 0, 0, 1] and outlier.logged[-1][1]["train/skipped"] == 1


def test_the_window_survives_a_restart(data, tmp_path):
    save, faults = str(tmp_path / "save"), Faults(huge_gradients=(6,))
    keys = {**SKIP, "data_path": data, "checkpoint_factor": 4}
    (whole,) = run(keys, faults=faults)
    run({**keys, "save": save, "exit_interval": 4})
    first = torch.load(tmp_path / "save" / "global_step4" / "mp_rank_00_model_states.pt", weights_only=True)
    assert first["scalars"]["outliers"]["loss"] == whole.loss[:4] and first["skipped_steps"] == 0
    reports = run({**keys, "save": save}, Layout(dp=2, zero=1), faults)
    for report in reports:  # of this start alone there is one step, and no limit
        assert report.skipped == [False, True] and report.loss == pytest.approx(whole.loss[4:], rel=1e-5)
    last = torch.load(tmp_path / "save" / "global_step6" / "mp_rank_00_model_states.pt", weights_only=True)
    assert last["skipped_steps"] == 0 and len(last["scalars"]["outliers"]["grad_norm"]) == 6


def test_a_loss_scale_does_not_react_to_an_outlier(data):
    keys = {**fp16_keys(), **SKIP, "data_path": data}
    (plain,) = run_fp16(keys, Layout())
    (report,) = run_fp16(keys, Layout(), Faults(huge_gradients=(6,)))
    assert report.skipped == [False] * 5 + [True]
    scales = [[metrics["train/loss_scale"] for _, metrics in one.logged] for one in (plain, report)]
    assert scales[0] == scales[1]
