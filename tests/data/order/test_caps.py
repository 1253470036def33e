"""Caps on epochs: refused with the numbers that work, or made up for by the other sources."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.order.caps import Caps, most_per_source, spread
from megatron.data.order.mixture import Mixture
from megatron.data.order.phases import Phase, Progress, make_phases
from megatron.errors import UserError
from tests.data.order.test_mixture import Numbers
from tests.data.order.test_phases import normalised, phased

pytestmark = pytest.mark.cpu


def caps(most: list[int | None], redistribute: bool = False) -> Caps:
    names = [chr(ord("a") + d) for d in range(len(most))]
    return Caps(names, [cap or 0 for cap in most], most, redistribute)


@settings(max_examples=150, deadline=None)
@given(phased(), st.data())
def test_what_fits_stays_and_what_is_refused_does_not_fit(
    run: tuple[tuple[Phase, ...], int], data: st.DataObject
) -> None:
    phases, samples = run
    number = st.one_of(st.none(), st.integers(0, 300))
    most = data.draw(st.lists(number, min_size=len(phases[0].weights), max_size=len(phases[0].weights)))
    taken = Mixture([Numbers(str(d), samples) for d in range(len(most))], phases, samples).taken
    bound = most_per_source(phases, samples)
    assert all(now <= at_most for now, at_most in zip(taken, bound, strict=True))
    if all(cap is None or now <= cap for now, cap in zip(bound, most, strict=True)):
        assert caps(most).fit(phases, samples, Progress()) == phases
    else:
        with pytest.raises(UserError, match="redistribute"):
            caps(most).fit(phases, samples, Progress())


@settings(max_examples=200, deadline=None)
@given(phased(), st.data())
def test_redistributed_draws_keep_every_cap(run: tuple[tuple[Phase, ...], int], data: st.DataObject) -> None:
    phases, samples = run
    number = st.one_of(st.none(), st.integers(0, 300))
    most = data.draw(st.lists(number, min_size=len(phases[0].weights), max_size=len(phases[0].weights)))
    try:
        fitted = caps(most, redistribute=True).fit(phases, samples, Progress())
    except UserError:
        # Only when a phase asks for nothing but sources that cannot give enough together.
        assert any(cap is not None for cap in most)
        return
    mixture = Mixture([Numbers(str(d), samples) for d in range(len(most))], fitted, samples)
    for taken, cap in zip(mixture.taken, most, strict=True):
        assert cap is None or taken <= cap
    assert [(phase.first, phase.asked) for phase in fitted] == [(phase.first, phase.asked) for phase in phases]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.integers(1, 1000), st.data())
def test_those_that_last_keep_their_proportions(raw: list[float], samples: int, data: st.DataObject) -> None:
    asked = normalised(raw)
    left = data.draw(st.lists(st.one_of(st.none(), st.integers(0, 1000)), min_size=len(raw), max_size=len(raw)))
    weights = spread(asked, samples, left)
    if weights is None:
        assert None not in left and sum(cap or 0 for cap in left) < samples
        return
    assert sum(weights) == pytest.approx(1)
    ratios = [weights[d] / asked[d] for d, cap in enumerate(left) if cap != round(weights[d] * samples, 6)]
    assert not ratios or max(ratios) == pytest.approx(min(ratios))
    for d, cap in enumerate(left):
        assert cap is not None or weights[d] >= asked[d] * (1 - 1e-9)  # nothing without a cap gets less


def test_the_refusal_names_numbers_that_work() -> None:
    phases = make_phases([(0, (0.75, 0.25))], Progress(10))
    with pytest.raises(UserError) as caught:
        caps([None, 50]).fit(phases, 300, Progress(10))
    message = str(caught.value)
    assert re.search(r"b: 75 samples .*\(1\.5 epochs\), 50 .*\(1 epochs\)", message)
    assert re.search(r"train_data_max_epochs: 1\.5,.* weight .*\b0\.1666 \(.*\b0\.25\)", message)
    steps = int(re.search(r"train_iters (\d+)", message).group(1))
    assert steps == 20
    caps([None, 50]).fit(phases, steps * 10, Progress(10))
    with pytest.raises(UserError):
        caps([None, 50]).fit(phases, (steps + 1) * 10, Progress(10))
    caps([None, 75]).fit(phases, 300, Progress(10))
    caps([None, 50]).fit(make_phases([(0, (1 - 0.1666, 0.1666))], Progress(10)), 300, Progress(10))


@pytest.mark.parametrize(("most", "samples"), [(1_234_567, 9_999_990), (3, 9_999_990), (3, 40), (41, 990)])
def test_the_numbers_named_work_also_where_rounding_counts(most: int, samples: int) -> None:
    phases = make_phases([(0, (0.5, 0.5))], Progress(10))
    with pytest.raises(UserError) as caught:
        caps([None, most]).fit(phases, samples, Progress(10))
    named = re.search(r"max_epochs: (\d\S*),.* weight \D*(\d\S*) ", str(caught.value))
    epochs, weight = float(named[1]), float(named[2])
    caps([None, math.floor(epochs * most + 1e-9)]).fit(phases, samples, Progress(10))
    caps([None, most]).fit(make_phases([(0, (1 - weight, weight))], Progress(10)), samples, Progress(10))


def test_a_cap_below_what_was_read_is_called_so() -> None:
    phases = make_phases([(0, (0.5, 0.5))], Progress(10))
    for redistribute in (False, True):
        with pytest.raises(UserError, match=r"^train_data_max_epochs: .*\n  b: (.|\n)*\b10 steps\b") as caught:
            caps([None, 20], redistribute=redistribute).fit(phases, 200, Progress(10, 10, 100))
        assert not re.search("train_iters|weight", str(caught.value))


def test_a_cap_reached_in_the_second_phase() -> None:
    phases = make_phases([(0, (0.5, 0.5)), (10, (0.0, 1.0))], Progress(10))
    with pytest.raises(UserError, match=r"b: 150 samples .* 120 are allowed(.|\n)*train_iters 17\b"):
        caps([None, 120]).fit(phases, 200, Progress(10))
    with pytest.raises(UserError, match="train_iters 17"):  # the second phase asks for nothing else
        caps([None, 120], redistribute=True).fit(phases, 200, Progress(10))
    phases = make_phases([(0, (0.5, 0.5)), (10, (0.2, 0.8))], Progress(10))
    fitted = caps([None, 120], redistribute=True).fit(phases, 200, Progress(10))
    assert fitted[0] == phases[0]  # first come, first served
    assert fitted[1].weights == pytest.approx((0.3, 0.7)) and fitted[1].asked == (0.2, 0.8)


def test_what_is_past_stays_when_the_rest_is_redistributed() -> None:
    """Half way through, the run is made longer than its second source lasts."""
    cap = caps([None, 60], redistribute=True)
    phases = make_phases([(0, (0.5, 0.5))], Progress(10))
    assert cap.fit(phases, 100, Progress(10)) == phases
    longer = cap.fit(phases, 200, Progress(10, 10, 100))
    assert longer[0] == phases[0]
    assert (longer[1].step, longer[1].first) == (10, 100)
    assert longer[1].weights == pytest.approx((0.9, 0.1)) and longer[1].asked == (0.5, 0.5)
    # And with a cap lifted, what was lowered comes back from here on.
    back = caps([None, 500], redistribute=True).fit(longer, 300, Progress(10, 15, 150))
    assert back[:2] == longer
    assert (back[2].first, back[2].weights) == (150, (0.5, 0.5))
