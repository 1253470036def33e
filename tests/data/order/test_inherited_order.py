"""A run inherits another run's sample order: no sample comes twice, none is left out, whatever changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.order.data_plan import DataPlan
from megatron.data.order.phases import Progress, phases_from
from megatron.data.order.saved_order import SavedOrder
from megatron.errors import UserError
from tests.data.order.test_resumed_mixture import BATCH, CHANGING, PACKINGS, config, paths, plan_of, read, saved

pytestmark = pytest.mark.cpu

__all__ = ["paths"]  # a fixture

DONE = 7  # steps of the first run, in its second phase
READ = DONE * BATCH
FIRSTS = pytest.mark.parametrize("first", [DONE, 0], ids=["steps continue", "steps restart"])


def pieces(plan: DataPlan) -> list[tuple[str, tuple[object, ...]]]:
    """Of every sample of the run, and of the run before: its source, and which tokens of which documents it holds."""
    train = plan.build().train
    found = [train.locate(i) for i in range(plan.roles["train"].samples)]
    return [(one.path[0], tuple(one.pieces)) for one in found]


def second(data, first: int, steps: int, order, batch: int = BATCH, taken: int = 0) -> DataPlan:
    """The plan of a run of `steps` steps that started after `READ` samples and has taken some of them."""
    return plan_of(data, first + steps, order, Progress(batch, first + taken, READ + taken * batch, (first, READ)))


@FIRSTS
@pytest.mark.parametrize("pack_impl", PACKINGS)
@pytest.mark.parametrize("batch", [BATCH, 2, 6])
def test_every_source_continues_in_its_order(paths, first, pack_impl, batch) -> None:
    """Other weights, one source more, another batch: of each source, the next samples are those it would have given."""
    before = plan_of(config(paths, "abc", CHANGING, pack_impl=pack_impl), 12)
    order = saved(before).inherit(DONE, (first, READ))
    assert order.start == (first, READ)
    wanted = ((0, (0.0, 1.0, 1.0, 2.0)), (first + 3, (1.0, 0.0, 0.0, 0.0)))
    data = config(paths, "abcd", wanted, pack_impl=pack_impl)
    after = second(data, first, 6, order, batch)
    here = pieces(after)
    assert len(here) == READ + 6 * batch and here[:READ] == pieces(before)[:READ]
    border = [name for name, _ in here[READ : READ + 3 * batch]]
    assert "a" not in border and {name for name, _ in here[READ + 3 * batch :]} == {"a"}
    planned = pieces(before)
    for name in "abcd":
        drawn = [sample for source, sample in here if source == name]
        to_come = [sample for source, sample in planned if source == name]
        both = min(len(drawn), len(to_come))
        assert drawn[:both] == to_come[:both] and len(set(drawn)) == len(drawn)


@FIRSTS
@pytest.mark.parametrize("pack_impl", PACKINGS)
def test_a_resume_of_the_second_run_changes_nothing(paths, first, pack_impl) -> None:
    wanted = ((0, (1.0, 1.0, 1.0, 1.0)), (first + 3, (0.0, 0.0, 1.0, 3.0)))
    data = config(paths, "abcd", wanted, pack_impl=pack_impl)
    order = saved(plan_of(config(paths, "abc", CHANGING, pack_impl=pack_impl), 12)).inherit(DONE, (first, READ))
    straight = second(data, first, 6, order)
    assert saved(straight).start == (first, READ)
    for taken in range(7):
        again = second(data, first, 6, saved(straight), taken=taken)
        assert saved(again) == saved(straight) and read(again) == read(straight)


def test_caps_count_what_the_first_run_read(paths) -> None:
    order = saved(plan_of(config(paths, "ab"), 12)).inherit(DONE, (0, READ))
    read_of_b = READ // 2
    with pytest.raises(UserError, match=f"b: {read_of_b + 8} samples"):
        second(config(paths, "ab", (0.0, 1.0), train_data_max_epochs=(None, 0.2)), 0, 2, order)
    second(config(paths, "ab", (0.0, 1.0), train_data_max_epochs=(None, 2.0)), 0, 2, order)


def test_an_order_of_its_own_begins_at_sample_0(paths) -> None:
    """Only the step is inherited: weights count from there, samples from 0."""
    order = SavedOrder().inherit(DONE, (DONE, 0))
    wanted = ((0, (1.0, 0.0)), (DONE + 2, (0.0, 1.0)))
    plan = plan_of(config(paths, "ab", wanted), DONE + 4, order, Progress(BATCH, DONE, 0, (DONE, 0)))
    assert [name for name, _ in pieces(plan)] == ["a"] * 8 + ["b"] * 8
    fresh = plan_of(config(paths, "ab", ((0, (1.0, 0.0)), (2, (0.0, 1.0)))), 4)
    assert pieces(plan) == pieces(fresh)
    again = plan_of(config(paths, "ab", wanted), DONE + 4, saved(plan), Progress(BATCH, DONE + 1, BATCH, (DONE, 0)))
    assert saved(again) == saved(plan)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 30), max_size=4, unique=True).map(lambda steps: [0, *sorted(steps)]),
    st.integers(0, 40),
)
def test_pairs_are_equal_from_a_step_on(steps: list[int], first: int) -> None:
    pairs = [(step, (float(step),)) for step in steps]

    def at(pairs: list[tuple[int, tuple[float, ...]]], step: int) -> tuple[float, ...]:
        return next(weights for start, weights in reversed(pairs) if start <= step)

    kept = phases_from(pairs, first)
    assert kept[0][0] == first
    assert all(at(kept, step) == at(pairs, step) for step in range(first, 45))


@pytest.mark.parametrize("start", [(0, 0), (5, 40), (0, 40), (5, 0)])
def test_samples_and_steps_of_a_run_with_its_own_start(start: tuple[int, int]) -> None:
    first, before = start
    progress = Progress(8, first + 2, before + 16, start)
    assert [progress.samples_at(first + n) for n in range(4)] == [before, before + 8, before + 16, before + 24]
    assert progress.samples_at(first - 1) == before
    assert progress.step_at(before + 24) == first + 3 and progress.step_at(before) == first
