"""Which steps forget, and what all steps take from which source, against counting one step after the other."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.forget_steps import FORGET, RETAIN, SOURCES, TRAIN, ForgetSteps

INTERLEAVED: dict[str, Any] = {"ga_mode": "interleaved", "ga_interleave_ratio": 2}
KEYS: dict[str, Any] = {"ga_dataset": "x", "ga_lr_scale": 0.5, "gd_mode": False, **INTERLEAVED}


def steps_of(**keys: Any) -> ForgetSteps:
    found = ForgetSteps.from_values((KEYS | keys).__getitem__)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (INTERLEAVED, [3, 6, 9, 12]),  # the code of GPT-NeoX's fork: step > 0 and step % (R + 1) == 0
        ({"ga_mode": "interleaved", "ga_interleave_ratio": 0}, list(range(14))),
        ({"ga_mode": "interleaved", "ga_interleave_ratio": 1}, [2, 4, 6, 8, 10, 12]),
        ({"ga_mode": "interval", "ga_interval": 4, "ga_iters": 2}, [4, 5, 10, 11]),
        ({"ga_mode": "interval", "ga_interval": 1, "ga_iters": 1}, [1, 3, 5, 7, 9, 11, 13]),
        ({"ga_mode": "interval", "ga_interval": 20, "ga_iters": 1}, []),
    ],
    ids=str,
)
def test_the_steps_that_forget(keys: dict[str, Any], expected: list[int]) -> None:
    forget = steps_of(**keys)
    assert [step for step in range(14) if forget.is_one(step)] == expected
    assert [forget.before(step) for step in range(15)] == [sum(k < step for k in expected) for step in range(15)]
    for step in expected:
        assert forget.burst_of(step) in expected and step - forget.burst_of(step) < forget.burst


def test_without_forget_data_no_step_forgets() -> None:
    assert ForgetSteps.from_values((KEYS | {"ga_dataset": None}).__getitem__) is None


@pytest.mark.parametrize("stages", [((0, 6),), ((0, 2), (3, 5), (4, 8)), ((0, 9), (1, 4), (7, 3))], ids=str)
@pytest.mark.parametrize("difference", [False, True])
def test_samples_by_source(stages: tuple[tuple[int, int], ...], difference: bool) -> None:
    """Difference steps take a whole batch of either source."""
    plan = BatchPlan(stages, forget=steps_of(gd_mode=difference))
    taken, total = dict.fromkeys(SOURCES, 0), 0
    for step in range(30):
        assert (plan.samples(step), {one: plan.only(one).samples(step) for one in SOURCES}) == (total, taken)
        batch = next(batch for first, batch in reversed(stages) if first <= step)
        names = (TRAIN,) if step % 3 or not step else (FORGET, RETAIN) if difference else (FORGET,)
        assert plan.sources(step) == names and plan.batch_size(step) == batch * len(names)
        assert plan.only(TRAIN).batch_size(step) == batch * (TRAIN in names)
        for samples in range(total, total + batch * len(names)):
            assert plan.whole_steps(samples) == step
        assert plan.lr_factor(step) == (0.5 if TRAIN not in names else 1.0)
        total += batch * len(names)
        taken = {one: count + batch * (one in names) for one, count in taken.items()}
