"""Best fit: padding, epochs, long documents."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.packing.best_fit import best_fit_patterns
from megatron.data.tokens.indexed import IndexedDataset
from tests.data.corpus import write
from tests.data.packing_cases import cases, corpus, packing

pytestmark = pytest.mark.cpu


@settings(max_examples=80, deadline=None)
@given(cases(), st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_best_fit_trains_every_target_once_per_epoch(case: Any, seq: int, seed: int, chop: bool) -> None:
    sizes, masks = case
    with corpus(sizes, masks) as (data, labels):
        found = packing("best_fit", data, seq, labels=labels, allow_chopped=chop)
        rows = found.samples_per_epoch()
        expected: Counter[int] = Counter()
        for document, size in enumerate(sizes):
            tokens = data.get(document).tolist()
            if chop or size <= seq + 1:
                expected.update(t for i, t in enumerate(tokens) if i and (masks is None or masks[document][i]))
        if not expected:
            assert rows == 0
            return
        dataset = found.dataset(found.segments(2 * rows, seed))
        assert len(dataset) == 2 * rows
        loader = StepLoader(dataset, micro_batch=1, gas=1, rules=CollateRules(seq))
        epochs: list[Counter[int]] = [Counter(), Counter()]
        for batch in loader.steps():
            epochs[batch.step // rows].update(batch.targets[batch.mask > 0].tolist())
        assert epochs == [expected, expected]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 30))
def test_best_fit_decreasing_is_that_of_single_pieces(sizes: list[int], capacity: int) -> None:
    """Against the rule piece by piece: as many rows, with as much room left in each."""
    sizes = [min(size, capacity) for size in sizes]
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [k for k, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda k: rooms[k])] -= size
        else:
            rooms.append(capacity - size)
    found = best_fit_patterns(np.bincount(sizes, minlength=capacity + 1), capacity)
    assert found.rows == len(rooms)
    left, pieces = [], Counter()
    for g, rows in enumerate(found.counts.tolist()):
        path = range(found.paths[g], found.paths[g + 1])
        pieces.update({k: rows * int(found.copies[k]) for k in path})
        left += [capacity - sum(int(found.sizes[k]) * int(found.copies[k]) for k in path)] * rows
    assert sorted(left) == sorted(rooms)
    by_size: Counter[int] = Counter()
    for k, count in pieces.items():
        by_size[int(found.sizes[k])] += count
    assert by_size == Counter(sizes)


def test_long_documents_in_pieces_share_a_token(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "x", [list(range(1, 21))]))
    found = packing("best_fit", data, 8)
    dataset = found.dataset(found.segments(3, 1))
    tokens = sorted(dataset[i].tokens[: dataset[i].length].tolist() for i in range(3))
    assert tokens == [list(range(1, 10)), list(range(9, 18)), list(range(17, 21))]


def test_padding_of_chats_is_below_one_percent() -> None:
    """Lengths as of chats: log-normal around 400 tokens, samples of 2048."""
    rng = np.random.RandomState(1)
    lengths = np.clip(np.exp(rng.normal(6.0, 1.0, 5000)), 2, 2049).astype(np.int64)
    found = best_fit_patterns(np.bincount(lengths, minlength=2050), 2049)
    assert 0 <= 1 - lengths.sum() / (found.rows * 2049) < 0.01
