"""Splits and sample counts: golden vectors, and the faults of the rule they come from."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.order.splits import parse_split, sample_counts, split_bounds
from megatron.errors import UserError

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("split", "documents", "expected"),
    [
        ("969, 30, 1", 1000, (0, 969, 999, 1000)),
        ("949,50,1", 7, (0, 7, 7, 7)),
        ("969/30/1", 1000, (0, 969, 999, 1000)),
        ("100", 12, (0, 12, 12, 12)),
        ("1,1", 4, (0, 2, 4, 4)),
        ("1,1,1", 4, (0, 2, 3, 4)),  # the missing document goes to the first split, as in NeoX
        ("0,50,50", 3, (0, 0, 1, 3)),  # NeoX: [0, -1, 1, 3]
        ("0,1,1", 1, (0, 0, 1, 1)),  # NeoX gives the one document to the share of 0
    ],
)
def test_bounds(split: str, documents: int, expected: tuple[int, ...]) -> None:
    assert split_bounds(split, documents) == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.integers(0, 5000))
def test_bounds_divide_the_documents(parts: list[int], documents: int) -> None:
    bounds = split_bounds(",".join(map(str, parts)), documents)
    assert bounds[0] == 0
    assert bounds[-1] == documents
    assert list(bounds) == sorted(bounds)
    for i, part in enumerate(parts):
        share = part / sum(parts) * documents
        assert abs(bounds[i + 1] - bounds[i] - share) <= 2
    if parts[0] == 0:
        assert bounds[1] == 0


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "-1,2", "1,2,3,4", "nan", "inf,1"])
def test_bad_splits(split: str) -> None:
    with pytest.raises(UserError, match="split"):
        parse_split(split)


def test_sample_counts() -> None:
    counts = sample_counts(train_iters=100, eval_interval=30, eval_iters=5, train_batch_size=8)
    assert counts == (800, 4 * 40, 40)
    assert sample_counts(train_iters=10, eval_interval=0, eval_iters=2, train_batch_size=4) == (40, 8, 8)
    assert sample_counts(train_iters=10, eval_interval=1000, eval_iters=0, train_batch_size=4) == (40, 0, 0)
