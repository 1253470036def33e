"""The compiled shuffle is numpy's: the same order and the same generator afterwards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.index_builders import shuffle as shuffles

pytestmark = pytest.mark.cpu


@pytest.fixture(params=["as installed", "numpy"])
def shuffle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shuffles, "_SMALL", 0)
    if request.param == "numpy":
        monkeypatch.setattr(shuffles, "_shuffle", None)
    return shuffles.shuffle


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint8])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 127, 128, 129, 130, 255, 257, 4096, 65_535, 65_537, 300_001])
def test_order_and_generator_are_numpys(shuffle, dtype: type, length: int) -> None:
    ours, theirs = np.random.RandomState(1234), np.random.RandomState(1234)
    mine, expected = np.arange(length).astype(dtype), np.arange(length).astype(dtype)
    for _ in range(2):  # the second time from the middle of the generator's words
        shuffle(ours, mine)
        theirs.shuffle(expected)
        assert np.array_equal(mine, expected)
    assert ours.randint(2**31, size=5).tolist() == theirs.randint(2**31, size=5).tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 700), st.integers(0, 2000))
def test_from_any_place_in_the_generator(seed: int, drawn: int, length: int) -> None:
    ours, theirs = np.random.RandomState(seed), np.random.RandomState(seed)
    for generator in (ours, theirs):
        generator.tomaxint(drawn)
        generator.randn()  # leaves a second normal number behind, which has to survive
    mine, expected = np.arange(length), np.arange(length)
    kept, shuffles._SMALL = shuffles._SMALL, 0
    try:
        shuffles.shuffle(ours, mine)
    finally:
        shuffles._SMALL = kept
    theirs.shuffle(expected)
    assert np.array_equal(mine, expected)
    assert ours.randn() == theirs.randn()


def test_slices_and_tables_go_to_numpy(shuffle) -> None:
    for make in (lambda: np.arange(40)[::2], lambda: np.arange(40).reshape(20, 2)):
        mine, expected = make(), make()
        shuffle(np.random.RandomState(3), mine)
        np.random.RandomState(3).shuffle(expected)
        assert np.array_equal(mine, expected)
