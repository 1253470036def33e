"""When forgetting stops: while the forget loss is above the threshold, decided before the step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from megatron.callbacks.unlearning import ForgetLimit

pytestmark = pytest.mark.cpu


class Losses:
    """Losses that are measured, one after the other."""

    def __init__(self, *values: float) -> None:
        self.values, self.measured = list(values), 0

    def __call__(self) -> float:
        self.measured += 1
        return self.values[self.measured - 1]


def decisions(limit: ForgetLimit, measure: Callable[[], float], bursts: Sequence[int]) -> list[bool]:
    return [limit.allows(burst, measure) for burst in bursts]


def test_each_step_is_compared_by_itself() -> None:
    measure = Losses(2.0, 3.0, 3.1, 2.9)
    assert decisions(ForgetLimit(3.0, "per_step", False), measure, [3, 6, 9, 12]) == [True, True, False, True]
    assert measure.measured == 4


def test_the_first_step_of_a_burst_decides_for_it() -> None:
    measure = Losses(2.0, 5.0, 1.0)
    limit = ForgetLimit(3.0, "per_burst", False)
    assert decisions(limit, measure, [4, 4, 4, 10, 10, 10, 16]) == [True] * 3 + [False] * 3 + [True]
    assert measure.measured == 3


@pytest.mark.parametrize("stay", [False, True])
def test_the_moving_average_of_the_losses_before(stay: bool) -> None:
    """0.9 and 0.1, as in the fork. Above the limit it is measured on, or for good it is not."""
    measure = Losses(2.0, 2.0, 2.0, 2.0)
    limit = ForgetLimit(3.0, "ema", stay)
    assert limit.allows(3, measure) and limit.average == 2.0
    limit.add(13.0)  # the step's own
    assert limit.average == pytest.approx(3.1)
    assert not limit.allows(6, measure)
    assert limit.average == pytest.approx(3.1 if stay else 2.99)
    assert limit.allows(9, measure) is not stay
    assert measure.measured == (1 if stay else 2)
    limit.add(float("nan"))
    assert limit.average == pytest.approx(3.1 if stay else 2.99)


@pytest.mark.parametrize("mode", ["per_step", "per_burst", "ema"])
def test_a_step_without_trained_tokens_is_left_out_and_decides_nothing(mode: str) -> None:
    limit, measured = ForgetLimit(3.0, mode, False), iter([None, 2.0])
    assert [limit.allows(4, lambda: next(measured)) for _ in range(2)] == [False, True]


def test_a_restart_decides_as_before() -> None:
    first = ForgetLimit(3.0, "per_burst", False)
    assert not first.allows(4, Losses(9.0))
    second = ForgetLimit(3.0, "per_burst", False)
    second.load(json.loads(json.dumps(first.state())))
    assert not second.allows(4, Losses()) and second.allows(10, Losses(1.0))
    average = ForgetLimit(3.0, "ema", False)
    average.load({"average": 3.5, "burst": None})
    assert not average.allows(4, Losses(3.5))
