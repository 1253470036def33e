"""Schedules that look at the step: closed tables, their ends, and beyond."""

import math

import pytest

from megatron.neox_arguments.lengths import cycle_ends, in_steps
from megatron.optim.schedules import learning_rate

pytestmark = pytest.mark.cpu

# W = 10, N = 100, min_lr 0.1 of lr: lingua's table of multipliers (apps/main optim.py), at 50, 90, 95, 99.
LINGUA = {"lr": 1.0, "min_lr": 0.1, "decay_iters": 100, "warmup": 0.1}
STEPS = (50, 90, 95, 99)


@pytest.mark.parametrize(
    ("style", "shape", "expected"),
    [
        ("polynomial", {}, (0.6, 0.2, 0.15, 0.11)),  # k = 1: its linear
        ("cosine", {}, (0.62814, 0.12714, 0.10684, 0.10027)),
        ("inverse_sqrt", {}, (0.44721, 0.33333, 0.32444, 0.31782)),
        ("power", {}, (0.44721, 0.33333, 0.32444, 0.31782)),
        ("power", {"power": 1.0}, (0.2, 1 / 9, 10 / 95, 10 / 99)),
        ("wsd", {"cooldown": lambda n: 0.2 * n, "cooldown_style": "inverse"}, (1, 0.18182, 0.12903, 0.10471)),
        ("wsd", {"cooldown": lambda n: 20}, (1, 0.55, 0.325, 0.145)),
        ("wsd", {"cooldown": lambda n: 20, "cooldown_style": "cosine"}, (1, 0.55, 0.23180, 0.10554)),
        (
            "wsd",
            {"cooldown": lambda n: 20, "cooldown_style": "sqrt"},
            (1, 1 - 0.9 * math.sqrt(0.5), 1 - 0.9 * math.sqrt(0.75), 1 - 0.9 * math.sqrt(0.95)),
        ),
        ("polynomial", {"power": 2.0}, (0.1 + 0.9 * 25 / 81, 0.1 + 0.9 / 81, 0.1 + 0.9 / 324, 0.1 + 0.9 / 8100)),
    ],
)
def test_tables(style: str, shape: dict, expected: tuple[float, ...]) -> None:
    def rate(step: int) -> float:
        return learning_rate(step, style=style, **LINGUA, **shape)

    assert [rate(step) for step in STEPS] == pytest.approx(expected, abs=6e-6)
    assert [rate(step) for step in (0, 1, 5, 10)] == pytest.approx([0.1, 0.1, 0.5, 1.0])
    end = {"inverse_sqrt": math.sqrt(0.1), "power": 0.1 ** shape.get("power", 0.5)}.get(style, 0.1)
    assert [rate(step) for step in (100, 101, 10**9)] == pytest.approx([end] * 3)


def test_wsd_s_in_unequal_cycles() -> None:
    """Ends at 50 and 100; 4 steps of re-warm-up, a fifth of each cycle of cooldown."""
    shape = {"cooldown": lambda n: 0.2 * n, "rewarmup": lambda n: 4, "cycles": (50.0, 100.0)}
    rates = {n: learning_rate(n, style="wsd_s", **LINGUA, **shape) for n in range(201)}
    table = {0: 0.1, 5: 0.5, 10: 1, 40: 1, 45: 0.55, 49: 0.19}
    table |= {50: 0.325, 51: 0.325, 52: 0.55, 53: 0.775, 54: 1, 90: 1, 95: 0.55, 99: 0.19, 100: 0.1, 200: 0.1}
    assert {n: rates[n] for n in table} == pytest.approx(table)
    alone = {n: learning_rate(n, style="wsd", **LINGUA, cooldown=lambda n: 20) for n in range(201)}
    assert alone == {n: learning_rate(n, style="wsd_s", **LINGUA, cooldown=lambda n: 20) for n in range(201)}


@pytest.mark.parametrize("style", ["wsd", "inverse_sqrt", "power", "polynomial", "wsd_s"])
@pytest.mark.parametrize("warmup", [0.0, 1.0, 40.0])
def test_ends_of_the_warm_up(style: str, warmup: float) -> None:
    """None; as long as the schedule; longer than it, as in a short trial of a long run's config."""
    rates = [
        learning_rate(n, lr=1.0, min_lr=0.0, decay_iters=10, warmup=warmup, style=style, cooldown=lambda n: 0.0)
        for n in range(500)
    ]
    assert all(0 <= rate <= 1 for rate in rates) and rates[0] == (1.0 if not warmup else 0.1 / warmup)
    assert warmup != 40 or rates[9] == pytest.approx(9 / 400)
    assert style not in ("wsd", "wsd_s") or warmup or (rates[9], rates[10]) == (1.0, 0.0)


def test_lengths() -> None:
    assert [in_steps(value, 200) for value in (0.25, "1e-1", "30 steps", "1 step")] == [50, 20, 30, 1]
    assert cycle_ends(4, 100) == (25, 50, 75, 100)
    assert cycle_ends((0.1, "30 steps", "200 steps"), 100) == (10, 30, 100)
