"""The orders of pack_until_overflow and unpacked: GPT-NeoX's, with its repairs.

The references are loops written from the description of the rules, over plain lists.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.packing import Segment
from megatron.data.packing import pack_until_overflow as overflow_module
from megatron.data.packing.pack_until_overflow import PackUntilOverflow
from megatron.data.tokens.cache import IndexCache
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError
from tests.data.corpus import GOLDEN, write
from tests.data.packing_cases import WHOLE, cases, corpus, packing, pieces_of, usable

pytestmark = pytest.mark.cpu


def rows_in_order(dataset: Any) -> list[list[tuple[int, int, int]]]:
    """The rows in the order of the walk, before they were shuffled."""
    order = np.argsort(dataset.arrays["shuffle_idx"], kind="stable")
    return [pieces_of(dataset, int(i)) for i in order]


# GPT-NeoX's own walks (its megatron/data/helpers.cpp)


def neox_overflow(sizes: list[int], used: set[int], samples: int, seq: int, seed: int) -> tuple[list, list]:
    """Rows until the one numbered `samples` has been begun, and the shuffle of the rows."""
    rng = np.random.RandomState(seed)
    shuffle = np.arange(samples)
    rng.shuffle(shuffle)
    permutation = np.arange(len(sizes))
    rng.shuffle(permutation)
    rows: list[list[int]] = []
    cursor = running = 0
    while True:
        if cursor == len(sizes):
            cursor = 0
            rng.shuffle(permutation)
        document = int(permutation[cursor])
        cursor += 1
        if document not in used:
            continue
        if running == 0 or running + sizes[document] > seq + 1:
            if len(rows) == samples:
                return rows, shuffle.tolist()
            rows.append([])
            running = sizes[document]
        else:
            running += sizes[document]
        rows[-1].append(document)


def neox_unpacked(used: list[int], samples: int, seed: int) -> tuple[list, list]:
    shuffle = np.arange(samples)
    np.random.RandomState(seed).shuffle(shuffle)
    return [[used[row % len(used)]] for row in range(samples)], shuffle.tolist()


def test_golden_overflow(tmp_path: Path) -> None:
    """Sizes 5, 9, 3, 12, 7, six samples of 8, seed 1234."""
    data = IndexedDataset(write(tmp_path / "x", GOLDEN))
    packed = packing("pack_until_overflow", data, 8)
    dataset = packed.dataset(packed.segments(6, 1234))
    rows, shuffle = neox_overflow([5, 9, 3, 12, 7], set(range(5)), 6, 8, 1234)
    assert dataset.arrays["shuffle_idx"].tolist() == shuffle
    assert dataset.arrays["doc_idx"].tolist() == list(itertools.chain(*rows))
    assert dataset.arrays["sample_idx"].tolist() == [[k, 0] for k in np.cumsum([0, *map(len, rows)]).tolist()]
    assert len(dataset) == 6
    # No token of the next document before the padding.
    documents = [dataset[i].tokens[: dataset[i].length].tolist() for i in range(6)]
    assert documents == [list(itertools.chain(*(GOLDEN[d][:9] for d in rows[r]))) for r in shuffle]
    assert all(not dataset[i].tokens[dataset[i].length :].any() for i in range(6))


def test_golden_numbers(tmp_path: Path) -> None:
    """The same five documents; the numbers were written down once and have to stay."""
    data = IndexedDataset(write(tmp_path / "x", GOLDEN))
    found = {name: packing(name, data, 8) for name in WHOLE}
    arrays = {
        name: {key: array.tolist() for key, array in one.dataset(one.segments(6, 1234)).arrays.items()}
        for name, one in found.items()
    }
    shuffled = [2, 1, 5, 0, 4, 3]
    # The passes are 2 0 4 3 1 and 0 1 2 4 3; rows of at most nine tokens.
    starts = [[0, 0], [2, 0], [3, 0], [4, 0], [5, 0], [6, 0], [7, 0]]
    assert arrays["pack_until_overflow"] == {
        "doc_idx": [2, 0, 4, 3, 1, 0, 1], "sample_idx": starts, "shuffle_idx": shuffled
    }  # fmt: skip
    assert arrays["unpacked"] == {"doc_idx": [0, 1, 2, 3, 4], "shuffle_idx": shuffled}
    # 5 is the rest of document 3, from its token 8 on.
    assert arrays["best_fit"] == {
        "doc_idx": [1, 3, 4, 0, 5, 2, 3, 1, 4, 0, 5, 2],
        "sample_idx": [0, 1, 2, 3, 5, 6],
        "shuffle_idx": [4, 3, 1, 2, 0, 3, 1, 4, 2, 0],
        "later_documents": [3],
        "later_offsets": [8],
    }


@settings(max_examples=120, deadline=None)
@given(cases(), st.integers(1, 9), st.integers(1, 25), st.integers(0, 99), st.booleans(), st.data())
def test_orders_are_those_of_neox(case: Any, seq: int, samples: int, seed: int, chop: bool, data: Any) -> None:
    sizes, masks = case
    used = usable(sizes, masks, seq, chop)
    cut = data.draw(st.sampled_from([None, (0, len(sizes)), (len(sizes) // 3, len(sizes))]))
    first, end = cut or (0, len(sizes))
    used = [document for document in used if first <= document < end]
    with corpus(sizes, masks) as (tokens, labels):
        options = {"documents": cut, "labels": labels, "allow_chopped": chop}
        for name in ("pack_until_overflow", "unpacked"):
            found = packing(name, tokens, seq, **options)
            if not used:
                with pytest.raises(UserError, match=rf"here: .*\bpack_impl {name}\b"):
                    found.segments(samples, seed, what="here")
                assert found.samples_per_epoch() == 0
                continue
            dataset = found.dataset(found.segments(samples, seed))
            if name == "unpacked":
                rows, shuffle = neox_unpacked(used, samples, seed)
            else:
                rows, shuffle = neox_overflow(sizes[first:end], {d - first for d in used}, samples, seq, seed)
                rows = [[d + first for d in row] for row in rows]
            assert len(dataset) == samples
            for i in range(samples):
                expected = [(d, 0, min(sizes[d], seq + 1)) for d in rows[shuffle[i]]]
                assert pieces_of(dataset, i) == expected


def test_a_large_order_is_that_of_neox(tmp_path: Path) -> None:
    """Large enough for the compiled shuffle, and over more than one pass."""
    sizes = np.random.RandomState(0).randint(2, 40, 6000)
    data = IndexedDataset(write(tmp_path / "x", [[1] * size for size in sizes.tolist()]))
    for name in ("pack_until_overflow", "unpacked"):
        found = packing(name, data, 64)
        samples = 2 * found.samples_per_epoch() + 10
        dataset = found.dataset(found.segments(samples, 7))
        if name == "unpacked":
            rows, shuffle = neox_unpacked(list(range(6000)), samples, 7)
        else:
            rows, shuffle = neox_overflow(sizes.tolist(), set(range(6000)), samples, 64, 7)
        assert [[d for d, *_ in pieces_of(dataset, i)] for i in range(samples)] == [rows[r] for r in shuffle]


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_overflow_and_unpacked_read_every_document_once_per_pass(case: Any, seq: int, seed: int, chop: bool) -> None:
    sizes, masks = case
    used = usable(sizes, masks, seq, chop)
    if not used:
        return
    with corpus(sizes, masks) as (data, labels):
        for name in ("pack_until_overflow", "unpacked"):
            found = packing(name, data, seq, labels=labels, allow_chopped=chop)
            # In three stretches: going on neither repeats nor leaves out.
            segments: tuple[Segment, ...] = ()
            for samples in (3, 4, 3 * len(used) + 5):
                segments = found.segments(samples, seed, segments)
            assert len(segments) == 3
            walked = [d for row in rows_in_order(found.dataset(segments)) for d, *_ in row]
            for start in range(0, len(walked) - len(used) + 1, len(used)):
                assert sorted(walked[start : start + len(used)]) == used


def test_the_rows_of_a_pass_are_counted_once(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "x", GOLDEN))
    cache = IndexCache(tmp_path / "cache")
    plain = packing("pack_until_overflow", data, 8).samples_per_epoch()
    with mock.patch.object(overflow_module, "_WORTH_KEEPING", 1):
        for _ in range(2):
            assert packing("pack_until_overflow", data, 8, cache=cache).samples_per_epoch() == plain
        with mock.patch.object(PackUntilOverflow, "_count_rows", lambda one: 99):
            assert packing("pack_until_overflow", data, 8, cache=cache).samples_per_epoch() == plain
            assert packing("pack_until_overflow", data, 7, cache=cache).samples_per_epoch() == 99
