"""Learning rates against closed formulas and the numbers users reported (known faults 21, 22, D1)."""

import math

import pytest

from megatron.errors import UserError
from megatron.optim.schedules import learning_rate, schedule

pytestmark = pytest.mark.cpu

TABLE = {"lr": 1e-3, "min_lr": 1e-4, "decay_iters": 50, "warmup": 0.2}


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 1e-4), (1, 1e-4), (5, 5e-4), (10, 1e-3), (30, 5.5e-4), (50, 1e-4), (60, 1e-4), (70, 1e-4), (90, 1e-4)],
)
def test_cosine_table(step, expected):
    assert learning_rate(step, style="cosine", **TABLE) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("style", "step", "expected"),
    [
        ("linear", 30, 5e-4),
        ("linear", 50, 1e-4),
        ("linear", 500, 1e-4),
        ("constant", 30, 1e-3),
        ("constant", 500, 1e-3),
        ("exponential", 30, 1e-3 * math.sqrt(0.1)),
        ("exponential", 50, 1e-4),
        ("exponential", 500, 1e-4),
    ],
)
def test_other_styles(style, step, expected):
    assert learning_rate(step, style=style, **TABLE) == pytest.approx(expected, rel=1e-9)


def test_exponential_without_floor_keeps_neox_half_life():
    assert learning_rate(100, lr=1e-3, min_lr=0.0, decay_iters=100, warmup=0.0, style="exponential") == pytest.approx(
        5e-4
    )


@pytest.mark.parametrize("style", ["cosine", "linear", "exponential", "constant"])
def test_never_zero_at_the_start_and_never_above_peak_or_below_floor(style):
    values = [learning_rate(step, style=style, **TABLE) for step in range(200)]
    assert values[0] > 0
    assert max(values) == pytest.approx(1e-3)
    assert min(values[10:]) >= 1e-4 - 1e-18


def test_no_warmup_starts_at_the_peak():
    assert learning_rate(0, lr=1e-3, min_lr=0.0, decay_iters=100, warmup=0.0, style="cosine") == 1e-3


def test_warmup_that_fills_the_schedule():
    rate = schedule(lr=1e-3, min_lr=1e-5, decay_iters=10, warmup=1.0, style="linear")
    assert rate(10) == pytest.approx(1e-3)
    assert rate(11) == pytest.approx(1e-5)


def test_unknown_style_is_refused_when_the_schedule_is_built():
    with pytest.raises(UserError, match="lr_decay_style: 'cosin' is not known. Did you mean 'cosine'"):
        schedule(lr=1e-3, min_lr=0.0, decay_iters=10, warmup=0.0, style="cosin")
