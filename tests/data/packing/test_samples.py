"""The way back from a document to its samples, against reading where every sample comes from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.order.mixture import Mixture, ReadOnce
from megatron.data.order.phases import Phase
from megatron.data.packing.samples import rows_over
from tests.data.packing_cases import ALL, corpus, packing

pytestmark = pytest.mark.cpu

# Longer than a sample, too; and the last one enough for any length.
LENGTHS = st.lists(st.integers(2, 30), min_size=1, max_size=11).map(lambda lengths: [*lengths, 30])


def by_reading(dataset: Any, prefix: str, items: range) -> set[int]:
    found = (dataset.locate(k) for k in range(len(dataset)))
    return {k for k, one in enumerate(found) if one.path[-1] == prefix and any(p.document in items for p in one.pieces)}


def check(dataset: Any, prefix: str, items: range) -> None:
    likely = dataset.may_hold({prefix: items})
    held = by_reading(dataset, prefix, items)
    assert likely.tolist() == sorted(set(likely.tolist()))
    assert held <= set(likely.tolist()) <= set(range(len(dataset)))
    assert not len(dataset.may_hold({"another": items}))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(3, 9), st.integers(1, 40), st.data())
def test_every_packing(name: str, lengths: list[int], seq: int, samples: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(lengths) - 2))
    items = range(*sorted(data.draw(st.tuples(*[st.integers(0, len(lengths))] * 2))))
    with corpus(lengths) as (tokens, _):
        one = packing(name, tokens, seq, documents=(first, len(lengths)))
        segments = one.segments(samples, 3)
        if data.draw(st.booleans()):
            segments = one.segments(2 * samples, 3, segments)  # a run that was made longer
        check(one.dataset(segments), str(tokens.prefix), items)


@pytest.mark.parametrize("name", ALL)
def test_few_samples_are_looked_at(name: str) -> None:
    with corpus([6] * 300) as (tokens, _):
        one = packing(name, tokens, 12)
        dataset = one.dataset(one.segments(one.samples_per_epoch(), 1))
        likely = dataset.may_hold({str(tokens.prefix): range(7, 8)})
        assert 1 <= len(by_reading(dataset, str(tokens.prefix), range(7, 8))) <= len(likely) <= 4


@settings(max_examples=30, deadline=None)
@given(LENGTHS, LENGTHS, st.integers(2, 60), st.integers(1, 30), st.data())
def test_mixtures_with_phases(one: list[int], other: list[int], samples: int, border: int, data: st.DataObject) -> None:
    drawn = st.tuples(*[st.integers(0, 3)] * 2).filter(any)
    weights = [tuple(w / sum(pair) for w in pair) for pair in (data.draw(drawn), data.draw(drawn))]
    phases = [Phase(first, first, pair, pair) for first, pair in zip((0, border), weights, strict=True)]
    with corpus(one) as (tokens, _), corpus(other) as (more, _):
        sources = []
        for name, part in (("packed", tokens), ("best_fit", more)):
            bound = packing(name, part, 5)
            sources.append(bound.dataset(bound.segments(samples + 2, 1)))
        mixture = Mixture(sources, phases, samples)
        check(mixture, str(tokens.prefix), range(1, 2))
        check(mixture, str(more.prefix), range(2))
        check(ReadOnce(mixture, max(1, samples // 2), samples), str(tokens.prefix), range(1, 2))


def test_rows_that_reach_over_a_place() -> None:
    begins = np.array([0, 0, 4, 4, 9, 12])
    assert np.flatnonzero(rows_over(begins, np.array([4]))).tolist() == [1, 2, 3]
    assert np.flatnonzero(rows_over(begins, np.array([2, 10]))).tolist() == [1, 4]
    assert not rows_over(begins, np.array([], dtype=int)).any()
