"""Batches that grow while a run goes on, at every layout: the curve of runs of one batch size after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.runs import KEYS, Faults, Report, corpus, run
from tests.training.test_resume import expected_lr
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

STAGES = [[0, 4], [2, 8], [4, 12]]
SIZES = [4, 4, 8, 8, 12, 12]
GROWING = {"train_batch_size": 12, "batch_size_schedule": STAGES}
BF16 = {"precision": "bfloat16"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def one_after_the_other(tmp_path_factory: pytest.TempPathFactory, data: str) -> Report:
    """Three runs on one rank, each with one batch size, which continue each other."""
    whole = Report()
    for batch, until in ((4, 2), (8, 4), (12, 6)):
        keys = {"data_path": data, "save": str(tmp_path_factory.getbasetemp() / "constant")}
        (part,) = run({**keys, "train_batch_size": batch, "train_iters": until})
        assert not part.error
        for name in ("loss", "grad_norm", "lr", "tokens"):
            getattr(whole, name).extend(getattr(part, name)[:2])  # of tokens, one step more is read ahead
        whole.state = part.state
    return whole


def test_a_growing_batch_is_one_size_after_the_other_bit_for_bit(data: str, one_after_the_other: Report) -> None:
    (report,) = run({**GROWING, "data_path": data})
    assert [len(step) for step in report.tokens] == SIZES and report.state == one_after_the_other.state
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert getattr(report, name) == getattr(one_after_the_other, name), name
    logged = [metrics["train/tokens"] for _, metrics in report.logged]
    assert logged == [16 * sum(SIZES[: k + 1]) for k in range(6)]


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        (Layout(dp=2, zero=2), {}),
        (Layout(pp=2, tp=2), {}),
        (Layout(dp=2, engine="native"), {}),
        pytest.param(Layout(dp=2, zero=1, micro=1), {}, marks=pytest.mark.slow),
        pytest.param(Layout(dp=2, zero=3), {}, marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, dp=2, zero=1), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_curve_does_not_depend_on_the_layout(
    data: str, one_after_the_other: Report, layout: Layout, keys: dict[str, Any]
) -> None:
    for report in run({**GROWING, **keys, "data_path": data}, layout):
        assert report.loss == pytest.approx(one_after_the_other.loss, rel=1e-5)
        assert report.grad_norm == pytest.approx(one_after_the_other.grad_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        (Layout(dp=2, zero=1), BF16),
        pytest.param(Layout(dp=2, engine="native"), BF16, marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, zero=1), BF16, marks=pytest.mark.slow),
        pytest.param(
            Layout(dp=2, zero=2),
            {**BF16, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_sums_in_bfloat16_runs_hold_all_micro_batches(
    data: str, one_after_the_other: Report, layout: Layout, keys: dict[str, Any]
) -> None:
    for report in run({**GROWING, **keys, "data_path": data}, layout):
        assert report.loss == pytest.approx(one_after_the_other.loss, rel=5e-3)
        assert report.grad_norm == pytest.approx(one_after_the_other.grad_norm, rel=0.05)


def test_a_resume_within_a_ramp_at_another_layout_reads_what_is_left(
    tmp_path: Path, data: str, one_after_the_other: Report
) -> None:
    keys = {**GROWING, "data_path": data, "save": str(tmp_path / "save"), "checkpoint_factor": 3}
    first = run({**keys, "train_iters": 3}, Layout(dp=2, zero=1))
    second = run(keys, Layout(dp=1, micro=4))
    assert first[0].steps == [1, 2, 3] and second[0].steps == [4, 5, 6]
    assert second[0].tokens == one_after_the_other.tokens[3:]
    assert first[0].loss + second[0].loss == pytest.approx(one_after_the_other.loss, rel=1e-5)


def test_the_learning_rate_follows_the_batch_size(data: str) -> None:
    (report,) = run({**GROWING, "data_path": data, "batch_size_lr_scale": "sqrt", "train_iters": 4})
    assert report.lr == pytest.approx([expected_lr(k) * (SIZES[k] / 12) ** 0.5 for k in range(4)], rel=1e-12)


def test_skipped_steps_consume_their_samples_and_update_nothing(data: str) -> None:
    """As if nothing in their samples were trained."""
    keys = {**GROWING, "data_path": data}
    (report,) = run({**keys, "skip_steps": [[1, 3]]}, Layout())
    (masked,) = run(keys, Layout(), Faults(all_masked=(2, 3)))
    assert report.skipped == masked.skipped == [False, True, True, False, False, False]
    assert report.loss == masked.loss and report.state == masked.state and report.tokens[3:] == masked.tokens[3:]
    assert len(report.tokens) == KEYS["train_iters"]
