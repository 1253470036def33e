"""The packings of whole documents: GPT-NeoX's order and its repairs, best fit, and what holds for all of them.

The references are loops written from the description of the rules, over plain lists.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import usable as usable_module
from megatron.data.best_fit_plan import best_fit_patterns
from megatron.data.build import build_datasets, epoch_samples
from megatron.data.cache import IndexCache
from megatron.data.collate import CollateRules
from megatron.data.index_builders import packing as index_packing
from megatron.data.index_builders import packing_fallback
from megatron.data.indexed import IndexedDataset
from megatron.data.joined import JoinedTokens
from megatron.data.loader import StepLoader
from megatron.data.packing import Packing, Segment
from megatron.data.packings import PACKINGS
from megatron.data.sample import Sample
from megatron.data.usable import fragment_pieces, scan_labels, whole_pieces
from megatron.errors import UserError
from megatron.neox_arguments.schema_data import DataConfig
from tests.data.corpus import GOLDEN, write

pytestmark = pytest.mark.cpu

WHOLE = ["pack_until_overflow", "unpacked", "best_fit"]
ALL = ["packed", *WHOLE]
PIECE = tuple[int, int, int]


@contextmanager
def corpus(sizes: list[int], masks: list[list[bool]] | None = None) -> Iterator[tuple[IndexedDataset, Any]]:
    """Documents whose tokens count through from 1 over all of them, and labels where `masks` is true."""
    with tempfile.TemporaryDirectory() as folder:
        ends = np.cumsum([1, *sizes]).tolist()
        documents = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
        data = IndexedDataset(write(Path(folder) / "x", documents, np.int32))
        labels = None
        if masks is not None:
            kept = [[t if m else -100 for t, m in zip(*pair)] for pair in zip(documents, masks, strict=True)]
            labels = IndexedDataset(write(Path(folder) / "l", kept, np.int32))
        yield data, labels


def packing(name: str, data: IndexedDataset, seq: int, **options: Any) -> Packing:
    return PACKINGS[name](data, seq_length=seq, **options)


def pieces_of(dataset: Any, index: int) -> list[PIECE]:
    return [(piece.document, piece.offset, piece.length) for piece in dataset.locate(index).pieces]


def rows_in_order(dataset: Any) -> list[list[PIECE]]:
    """The rows in the order of the walk, before they were shuffled."""
    order = np.argsort(dataset.arrays["shuffle_idx"], kind="stable")
    return [pieces_of(dataset, int(i)) for i in order]


def trains(size: int, mask: list[bool] | None, seq: int) -> bool:
    return size > 1 if mask is None else any(mask[1 : seq + 1])


def usable(sizes: list[int], masks: list[list[bool]] | None, seq: int, chop: bool) -> list[int]:
    return [d for d, size in enumerate(sizes) if trains(size, masks and masks[d], seq) and (chop or size <= seq + 1)]


# GPT-NeoX's own walks, from their description (spec of the data formats, 4.2)


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
    dataset = packed.dataset(packed.plan(6, 1234))
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
        name: {key: array.tolist() for key, array in one.dataset(one.plan(6, 1234)).arrays.items()}
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


SIZES = st.lists(st.integers(0, 14), min_size=1, max_size=12)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[list[bool]] | None]:
    sizes = draw(SIZES)
    if draw(st.booleans()):
        return sizes, None
    return sizes, [draw(st.lists(st.booleans(), min_size=size, max_size=size)) for size in sizes]


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
                with pytest.raises(UserError, match=f"here: no document can be trained on with pack_impl {name}"):
                    found.plan(samples, seed, what="here")
                assert found.samples_per_epoch() == 0
                continue
            dataset = found.dataset(found.plan(samples, seed))
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
        dataset = found.dataset(found.plan(samples, 7))
        if name == "unpacked":
            rows, shuffle = neox_unpacked(list(range(6000)), samples, 7)
        else:
            rows, shuffle = neox_overflow(sizes.tolist(), set(range(6000)), samples, 64, 7)
        assert [[d for d, *_ in pieces_of(dataset, i)] for i in range(samples)] == [rows[r] for r in shuffle]


@settings(max_examples=80, deadline=None)
@given(cases(), st.integers(1, 9), st.integers(1, 25), st.integers(0, 99), st.booleans(), st.sampled_from(WHOLE))
def test_what_holds_for_every_sample(case: Any, seq: int, samples: int, seed: int, chop: bool, name: str) -> None:
    sizes, masks = case
    if not usable(sizes, masks, seq, chop) and not (chop and name == "best_fit"):
        return
    with corpus(sizes, masks) as (data, labels):
        found = packing(name, data, seq, labels=labels, allow_chopped=chop)
        try:
            dataset = found.dataset(found.plan(samples, seed))
        except UserError:
            assert not any(trains(size, masks and masks[d], max(sizes)) for d, size in enumerate(sizes))
            return
        assert len(dataset) >= samples
        for i in range(len(dataset)):
            sample, pieces = dataset[i], pieces_of(dataset, i)
            assert len(sample.tokens) == seq + 1
            assert sample.length == sum(length for _, _, length in pieces) <= seq + 1
            assert sample.starts.tolist() == np.cumsum([0] + [length for *_, length in pieces])[:-1].tolist()
            expected = [data.get(*piece).tolist() for piece in pieces]
            assert sample.tokens.tolist() == [*itertools.chain(*expected), *[0] * (seq + 1 - sample.length)]
            if masks is not None:
                truth = np.concatenate([np.asarray(mask, bool) for mask in masks])
                for token, label in zip(sample.tokens.tolist(), sample.labels.tolist(), strict=True):
                    assert label == (token if token and truth[token - 1] else -100)
            else:
                assert sample.labels is None
        for wrong in (-1, len(dataset)):
            with pytest.raises(IndexError, match=f"of {len(dataset)}"):
                dataset[wrong]
            with pytest.raises(IndexError):
                dataset.locate(wrong)


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
                segments = found.plan(samples, seed, segments)
            assert len(segments) == 3
            walked = [d for row in rows_in_order(found.dataset(segments)) for d, *_ in row]
            for start in range(0, len(walked) - len(used) + 1, len(used)):
                assert sorted(walked[start : start + len(used)]) == used


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
        dataset = found.dataset(found.plan(2 * rows, seed))
        assert len(dataset) == 2 * rows
        loader = StepLoader(dataset, micro_batch=1, gas=1, rules=CollateRules(seq))
        epochs: list[Counter[int]] = [Counter(), Counter()]
        for batch in loader.steps():
            epochs[batch.step // rows].update(batch.targets[batch.mask > 0].tolist())
        assert epochs == [expected, expected]


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(2, 9), st.integers(0, 99))
def test_the_same_is_trained_in_every_packing(case: Any, seq: int, seed: int) -> None:
    """(input, target) pairs of an epoch are those of the documents alone; best_fit goes on after seq + 1 tokens."""
    sizes, masks = case
    used = usable(sizes, masks, seq, True)
    if not used:
        return
    with corpus(sizes, masks) as (data, labels):
        alone = Counter(
            (token, token + 1)
            for d in used
            for i, token in enumerate(data.get(d)[: seq + 1].tolist()[:-1])
            if masks is None or masks[d][i + 1]
        )
        for name in WHOLE:
            fits = name != "best_fit" or max(sizes) <= seq + 1
            found = packing(name, data, seq, labels=labels)
            samples = found.samples_per_epoch() if name == "best_fit" else len(used)
            dataset = found.dataset(found.plan(samples, seed))
            pairs: Counter[tuple[int, int]] = Counter()
            rules = CollateRules(seq, intra_document_masking=True)
            for batch in StepLoader(dataset, micro_batch=1, gas=1, rules=rules).steps():
                trained = batch.mask > 0
                pairs.update(zip(batch.tokens[trained].tolist(), batch.targets[trained].tolist(), strict=True))
            if name == "pack_until_overflow":  # as many rows as documents: at least one pass
                assert set(pairs) == set(alone)
            elif fits:
                assert pairs == alone


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


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 9), st.integers(1, 30), st.integers(0, 99), st.booleans())
def test_compiled_and_numpy_builders_agree(case: Any, seq: int, samples: int, seed: int, chop: bool) -> None:
    if index_packing._packing is None:
        pytest.fail("the compiled builders are missing: python setup.py build_ext --inplace")
    sizes, _ = case
    with corpus(sizes) as (data, _):
        for name in WHOLE:
            built = []
            for module in (index_packing._packing, packing_fallback):
                with mock.patch.object(index_packing, "builders", lambda module=module: module):
                    found = packing(name, data, seq, allow_chopped=chop)
                    try:
                        segments = found.plan(samples, seed)
                    except UserError:
                        built.append(None)
                        continue
                    built.append((found.samples_per_epoch(), found.dataset(segments).arrays))
            if built[0] is None:
                assert built[1] is None
                continue
            assert built[0][0] == built[1][0]
            assert built[0][1].keys() == built[1][1].keys()
            for array, same in zip(built[0][1].values(), built[1][1].values(), strict=True):
                assert array.dtype == same.dtype and np.array_equal(array, same)


@pytest.mark.parametrize("name", ALL)
def test_a_run_made_longer_keeps_its_past(tmp_path: Path, name: str) -> None:
    data = IndexedDataset(write(tmp_path / "x", GOLDEN * 3))
    found = packing(name, data, 8)
    first = found.plan(7, 1234)
    assert found.plan(7, 99, first) == first == found.plan(2, 1234, first)
    short = found.dataset(first)
    longer = found.plan(3 * len(short), 1234, first)
    assert longer[: len(first)] == first and len(longer) == 2
    assert longer[1].seed != first[0].seed
    long = found.dataset(longer)
    assert len(long) >= 3 * len(short)
    for i in range(len(short)):
        assert np.array_equal(short[i].tokens, long[i].tokens)
        assert short.locate(i).pieces == long.locate(i).pieces
    # Nothing of the appended stretch is lost or read from the wrong rows.
    assert len({tuple(long[i].tokens.tolist()) for i in range(len(short), len(long))}) > 1


@pytest.mark.parametrize("name", ALL)
def test_the_order_depends_on_sizes_and_seed_only(tmp_path: Path, name: str) -> None:
    one = IndexedDataset(write(tmp_path / "a", GOLDEN * 3))
    other = IndexedDataset(write(tmp_path / "b", [[7] * len(document) for document in GOLDEN * 3], np.int32))
    orders = []
    for data, seed in ((one, 1), (other, 1), (one, 2)):
        found = packing(name, data, 8)
        dataset = found.dataset(found.plan(20, seed))
        orders.append((found.key, [dataset.locate(i).pieces for i in range(20)]))
    assert orders[0] == orders[1]
    assert orders[0][0] == orders[2][0] and orders[0][1] != orders[2][1]


@pytest.mark.parametrize("name", WHOLE)
def test_cached_and_built_in_memory_agree(tmp_path: Path, name: str) -> None:
    data = IndexedDataset(write(tmp_path / "x", GOLDEN))
    labels = IndexedDataset(write(tmp_path / "l", [[-100, *document[1:]] for document in GOLDEN], np.int32))
    cache = IndexCache(tmp_path / "cache")
    found = [packing(name, data, 8, labels=labels, cache=c) for c in (None, cache, cache)]
    datasets = [p.dataset(p.plan(9, 5), c, "x") for p, c in zip(found, (None, cache, cache), strict=True)]
    assert len({dataset.digest() for dataset in datasets}) == 1
    for i in range(len(datasets[0])):
        assert len({tuple(dataset[i].tokens.tolist()) for dataset in datasets}) == 1
    assert len({p.key for p in found}) == 1


@pytest.mark.parametrize("name", ALL)
def test_keys_tell_apart_what_orders_differ_by(tmp_path: Path, name: str) -> None:
    data = IndexedDataset(write(tmp_path / "x", GOLDEN))
    other = IndexedDataset(write(tmp_path / "y", GOLDEN[::-1]))
    labels = []
    for silent in (0, 1):  # the document that is not trained
        kept = [[-100] * len(document) if d == silent else document for d, document in enumerate(GOLDEN)]
        labels.append(IndexedDataset(write(tmp_path / f"l{silent}", kept, np.int32)))
    keys = [
        packing(name, data, 8).key,
        packing(name, data, 7).key,
        packing(name, other, 8).key,
        packing(name, data, 8, documents=(1, 5)).key,
        packing("unpacked" if name != "unpacked" else "best_fit", data, 8).key,
    ]
    assert len(set(keys)) == len(keys)
    if name != "packed":
        more = [packing(name, data, 8, labels=one).key for one in labels]
        more.append(packing(name, data, 8, allow_chopped=False).key)
        assert len({keys[0], *more}) == 4


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 9), st.integers(1, 40), st.integers(1, 5))
def test_labels_are_read_in_stretches(case: Any, seq: int, chunk: int, chunk_pieces: int) -> None:
    sizes, masks = case
    if masks is None:
        return
    with (
        corpus(sizes, masks) as (data, labels),
        mock.patch.multiple(usable_module, CHUNK_TOKENS=chunk, CHUNK_PIECES=chunk_pieces),
    ):
        for cut in (whole_pieces(data.sizes, 0, seq + 1, True), fragment_pieces(data.sizes, 0, seq + 1)):
            pieces = cut[0]
            documents = [*range(len(sizes)), *pieces.later_documents.tolist()]
            offsets = [*[0] * len(sizes), *pieces.later_offsets.tolist()]
            expected = [
                any(masks[d][offset + 1 : offset + length])
                for d, offset, length in zip(documents, offsets, pieces.lengths.tolist(), strict=True)
            ]
            assert scan_labels(pieces, labels).tolist() == expected


def test_labels_of_joined_files(tmp_path: Path) -> None:
    """Each file has its own offsets: what trains is found in the right one."""
    parts, label_parts = [], []
    for k, mask in enumerate([[True, False], [False, False, True]]):
        documents = [[10 * k + i + 1] * (3 + i) for i in range(len(mask))]
        parts.append(IndexedDataset(write(tmp_path / f"x{k}", documents)))
        kept = [d if m else [-100] * len(d) for d, m in zip(documents, mask, strict=True)]
        label_parts.append(IndexedDataset(write(tmp_path / f"l{k}", kept, np.int32)))
    data, labels = JoinedTokens(parts, "x"), JoinedTokens(label_parts, "l")
    found = packing("unpacked", data, 4, labels=labels)
    dataset = found.dataset(found.plan(2, 1))
    assert sorted(dataset.locate(i).pieces[0].document for i in range(2)) == [0, 4]
    assert found.left_out.silent == 3


def test_what_is_left_out_is_counted_and_said(tmp_path: Path) -> None:
    documents = [[1] * 12, [2] * 4, [3], [], [4] * 9]
    data = IndexedDataset(write(tmp_path / "x", documents))
    assert packing("pack_until_overflow", data, 8, allow_chopped=False).notes() == [
        "1 documents of more than 9 tokens (seq_length + 1) are left out (allow_chopped: true cuts them)",
        "1 documents train nothing (less than two tokens) and are left out",
        "an epoch is 2 samples, 27.78% of them padding",
    ]
    assert packing("unpacked", data, 8).notes() == [
        "1 documents are cut to 9 tokens (seq_length + 1), which loses 3 tokens",
        "1 documents train nothing (less than two tokens) and are left out",
        "an epoch is 3 samples, 18.52% of them padding",
    ]
    assert packing("best_fit", data, 8).notes() == [
        "1 documents of more than 9 tokens (seq_length + 1) are read in several pieces",
        "1 documents train nothing (less than two tokens) and are left out",
        "an epoch is 3 samples, 3.70% of them padding",
    ]
    assert packing("packed", data, 8).notes() == []


def test_long_documents_in_pieces_share_a_token(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "x", [list(range(1, 21))]))
    found = packing("best_fit", data, 8)
    dataset = found.dataset(found.plan(3, 1))
    tokens = sorted(dataset[i].tokens[: dataset[i].length].tolist() for i in range(3))
    assert tokens == [list(range(1, 10)), list(range(9, 18)), list(range(17, 21))]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("micro", "dp", "workers"), [(4, 1, 0), (1, 4, 2), (2, 2, 1)])
def test_the_stream_does_not_depend_on_the_layout(tmp_path: Path, name: str, micro: int, dp: int, workers: int) -> None:
    rng = np.random.RandomState(3)
    documents = [rng.randint(1, 500, rng.randint(1, 30)).tolist() for _ in range(80)]
    data = IndexedDataset(write(tmp_path / "x", documents))
    found = packing(name, data, 16)
    dataset = found.dataset(found.plan(48, 5))
    rules = CollateRules(16, eod=0, intra_document_masking=True)
    straight = StepLoader(dataset, micro_batch=8, gas=1, rules=rules)
    loaders = [
        StepLoader(dataset, micro_batch=micro, gas=2, dp_rank=r, dp_size=dp, rules=rules, num_workers=workers)
        for r in range(dp)
    ]
    for consumed in (0, 24):  # from the start, and gone on with after 24 samples
        expected = list(straight.steps(consumed))[:3]
        for rank, loader in enumerate(loaders):
            for batch, whole in zip(itertools.islice(loader.steps(consumed), 3), expected, strict=True):
                for name_of in ("tokens", "targets", "mask", "positions", "doc_ids"):
                    mine = getattr(whole, name_of)[0].view(2, dp, micro, 16)[:, rank]
                    assert torch.equal(getattr(batch, name_of), mine)


def test_padding_of_chats_is_below_one_percent() -> None:
    """Lengths as of chats: log-normal around 400 tokens, samples of 2048."""
    rng = np.random.RandomState(1)
    lengths = np.clip(np.exp(rng.normal(6.0, 1.0, 5000)), 2, 2049).astype(np.int64)
    found = best_fit_patterns(np.bincount(lengths, minlength=2050), 2049)
    assert 0 <= 1 - lengths.sum() / (found.rows * 2049) < 0.01


class TestRowsInAStep:
    """How a row of whole documents becomes arrays: padding, borders, labels."""

    def only(self, tokens: list[int], starts: list[int], length: int, labels: Any = None, **rules: Any) -> Any:
        sample = Sample(np.asarray(tokens), np.asarray(starts), labels and np.asarray(labels), length)
        (batch,) = StepLoader([sample], micro_batch=1, gas=1, rules=CollateRules(len(tokens) - 1, **rules)).steps()
        return batch

    def test_padding_is_not_trained_and_a_document_of_its_own(self) -> None:
        batch = self.only([5, 6, 7, 8, 9, 0, 0, 0], [0, 3], 5, intra_document_masking=True)
        assert batch.tokens.tolist() == [[[5, 6, 7, 8, 9, 0, 0]]]
        assert batch.mask.tolist() == [[[1, 1, 0, 1, 0, 0, 0]]]  # 7 does not predict 8, 9 not the padding
        assert batch.doc_ids.tolist() == [[[0, 0, 0, 1, 1, 2, 2]]]
        assert batch.positions.tolist() == [[[0, 1, 2, 0, 1, 0, 1]]]

    def test_positions_count_through_without_document_masking(self) -> None:
        batch = self.only([5, 6, 7, 8, 9, 0, 0, 0], [0, 3], 5)
        assert batch.positions.tolist() == [[list(range(7))]]
        assert batch.doc_ids is None
        assert batch.mask.tolist() == [[[1, 1, 0, 1, 0, 0, 0]]]

    @pytest.mark.parametrize("length", [7, 8])
    def test_a_row_that_is_nearly_full(self, length: int) -> None:
        tokens = [*range(1, length + 1), *[0] * (8 - length)]
        batch = self.only(tokens, [0], length, intra_document_masking=True)
        assert batch.mask.tolist() == [[[1.0] * (length - 1) + [0.0] * (8 - length)]]
        assert batch.doc_ids.tolist() == [[[0] * 7]]

    def test_padding_that_looks_like_the_end_of_a_document(self) -> None:
        batch = self.only([5, 6, 0, 0, 0, 0], [0], 3, eod=0, intra_document_masking=True)
        assert batch.doc_ids.tolist() == [[[0, 0, 0, 1, 1]]]
        assert batch.mask.tolist() == [[[1, 1, 0, 0, 0]]]  # the end is trained although padding has its id

    def test_labels(self) -> None:
        labels = [-100, 6, 7, 8, 9, -100, -100, -100]
        batch = self.only([5, 6, 7, 8, 9, 0, 0, 0], [0, 3], 5, labels)
        assert batch.mask.tolist() == [[[1, 1, 0, 1, 0, 0, 0]]]
        assert batch.targets[batch.mask > 0].tolist() == [6, 7, 9]

    def test_no_loss_after_the_end_of_a_document(self) -> None:
        batch = self.only([5, 1, 7, 8, 1, 0, 0, 0], [0], 5, eod=1, eod_mask_loss=True)
        assert batch.mask.tolist() == [[[1, 0, 1, 1, 0, 0, 0]]]


@pytest.mark.parametrize("name", ALL)
def test_split_shares_no_document(tmp_path: Path, name: str) -> None:
    prefix = write(tmp_path / "x", [[1 + d] * (7 + d % 3) for d in range(30)])
    config = DataConfig(data_path=prefix, split="8,1,1", pack_impl=name)
    built = build_datasets(config, seq_length=8, seed=1, train_samples=200, valid_samples=20, test_samples=10)
    roles = (built.train, built.valid, built.test)
    seen = [{piece.document for i in range(len(role)) for piece in role.locate(i).pieces} for role in roles]
    assert seen == [set(range(24)), set(range(24, 27)), set(range(27, 30))]
    tokens = [{int(t) for i in range(len(role)) for t in role[i].tokens} - {0} for role in roles]
    assert tokens == [{document + 1 for document in documents} for documents in seen]


@pytest.mark.parametrize("name", ALL)
def test_samples_of_an_epoch_are_known_before(tmp_path: Path, name: str) -> None:
    """`train_epochs` is counted in them: of documents of 12, 4, 9, 8 and 6 tokens and an empty one; labels decide too."""
    documents = [[1] * 12, [2] * 4, [3] * 9, [], [4] * 8, [5] * 6]
    prefix = write(tmp_path / "x", documents)
    labels = write(tmp_path / "l", documents, np.int32)
    config = DataConfig(train_data_paths=(prefix,), train_label_data_paths=(labels,), pack_impl=name)
    assert epoch_samples(config, 8) == (4 if name == "packed" else 5)
    masked = write(tmp_path / "m", [*documents[:4], [-100] * 8, [-100] * 6], np.int32)
    config = DataConfig(train_data_paths=(prefix,), train_label_data_paths=(masked,), pack_impl=name)
    assert epoch_samples(config, 8) == (4 if name == "packed" else 3)
