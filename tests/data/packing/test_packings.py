"""What holds for every packing: what is in a sample, what is trained, caches, layouts, longer runs, splits."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.collate import CollateRules
from megatron.data.index_builders import packing as index_packing
from megatron.data.index_builders import packing_fallback
from megatron.data.loader import StepLoader
from megatron.data.order.datasets import build_datasets, epoch_samples
from megatron.data.tokens.cache import IndexCache
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError
from megatron.neox_arguments.schema_data import DataConfig
from tests.data.corpus import GOLDEN, write
from tests.data.packing_cases import ALL, WHOLE, cases, corpus, packing, pieces_of, trains, usable

pytestmark = pytest.mark.cpu


@settings(max_examples=80, deadline=None)
@given(cases(), st.integers(1, 9), st.integers(1, 25), st.integers(0, 99), st.booleans(), st.sampled_from(WHOLE))
def test_what_holds_for_every_sample(case: Any, seq: int, samples: int, seed: int, chop: bool, name: str) -> None:
    sizes, masks = case
    if not usable(sizes, masks, seq, chop) and not (chop and name == "best_fit"):
        return
    with corpus(sizes, masks) as (data, labels):
        found = packing(name, data, seq, labels=labels, allow_chopped=chop)
        try:
            dataset = found.dataset(found.segments(samples, seed))
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
            dataset = found.dataset(found.segments(samples, seed))
            pairs: Counter[tuple[int, int]] = Counter()
            rules = CollateRules(seq, intra_document_masking=True)
            for batch in StepLoader(dataset, micro_batch=1, gas=1, rules=rules).steps():
                trained = batch.mask > 0
                pairs.update(zip(batch.tokens[trained].tolist(), batch.targets[trained].tolist(), strict=True))
            if name == "pack_until_overflow":  # as many rows as documents: at least one pass
                assert set(pairs) == set(alone)
            elif fits:
                assert pairs == alone


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 9), st.integers(1, 30), st.integers(0, 99), st.booleans())
def test_compiled_and_numpy_builders_agree(case: Any, seq: int, samples: int, seed: int, chop: bool) -> None:
    sizes, _ = case
    with corpus(sizes) as (data, _):
        for name in WHOLE:
            built = []
            for module in (index_packing.builders(), packing_fallback):
                with mock.patch.object(index_packing, "builders", lambda module=module: module):
                    found = packing(name, data, seq, allow_chopped=chop)
                    try:
                        segments = found.segments(samples, seed)
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
    first = found.segments(7, 1234)
    assert found.segments(7, 99, first) == first == found.segments(2, 1234, first)
    short = found.dataset(first)
    longer = found.segments(3 * len(short), 1234, first)
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
        dataset = found.dataset(found.segments(20, seed))
        orders.append((found.key, [dataset.locate(i).pieces for i in range(20)]))
    assert orders[0] == orders[1]
    assert orders[0][0] == orders[2][0] and orders[0][1] != orders[2][1]


@pytest.mark.parametrize("name", WHOLE)
def test_cached_and_built_in_memory_agree(tmp_path: Path, name: str) -> None:
    data = IndexedDataset(write(tmp_path / "x", GOLDEN))
    labels = IndexedDataset(write(tmp_path / "l", [[-100, *document[1:]] for document in GOLDEN], np.int32))
    cache = IndexCache(tmp_path / "cache")
    found = [packing(name, data, 8, labels=labels, cache=c) for c in (None, cache, cache)]
    datasets = [p.dataset(p.segments(9, 5)) for p in found]
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


def note_facts(notes: list[str]) -> list[list[str]]:
    """Of each note: what happens to how many documents, limits, keys and shares."""
    words = r"\d[\d.]*%?|left out|cut\b|pieces\b|loses|padding|two tokens|allow_chopped: true"
    return [re.findall(words, note) for note in notes]


def test_what_is_left_out_is_counted_and_reported(tmp_path: Path) -> None:
    documents = [[1] * 12, [2] * 4, [3], [], [4] * 9]
    data = IndexedDataset(write(tmp_path / "x", documents))
    assert note_facts(packing("pack_until_overflow", data, 8, allow_chopped=False).notes()) == [
        ["1", "9", "1", "left out", "allow_chopped: true"],
        ["1", "two tokens", "left out"],
        ["2", "27.78%", "padding"],
    ]
    assert note_facts(packing("unpacked", data, 8).notes()) == [
        ["1", "cut", "9", "1", "loses", "3"],
        ["1", "two tokens", "left out"],
        ["3", "18.52%", "padding"],
    ]
    assert note_facts(packing("best_fit", data, 8).notes()) == [
        ["1", "9", "1", "pieces"],
        ["1", "pieces", "two tokens", "left out"],
        ["3", "3.70%", "padding"],
    ]
    assert packing("packed", data, 8).notes() == []


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("micro", "dp", "workers"), [(4, 1, 0), (1, 4, 2), (2, 2, 1)])
def test_the_stream_does_not_depend_on_the_layout(tmp_path: Path, name: str, micro: int, dp: int, workers: int) -> None:
    rng = np.random.RandomState(3)
    documents = [rng.randint(1, 500, rng.randint(1, 30)).tolist() for _ in range(80)]
    data = IndexedDataset(write(tmp_path / "x", documents))
    found = packing(name, data, 16)
    dataset = found.dataset(found.segments(48, 5))
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
    """`train_epochs` is counted in them: documents of 12, 4, 9, 8 and 6 tokens and an empty one; labels decide too."""
    documents = [[1] * 12, [2] * 4, [3] * 9, [], [4] * 8, [5] * 6]
    prefix = write(tmp_path / "x", documents)
    labels = write(tmp_path / "l", documents, np.int32)
    config = DataConfig(train_data_paths=(prefix,), train_label_data_paths=(labels,), pack_impl=name)
    assert epoch_samples(config, 8) == (4 if name == "packed" else 5)
    masked = write(tmp_path / "m", [*documents[:4], [-100] * 8, [-100] * 6], np.int32)
    config = DataConfig(train_data_paths=(prefix,), train_label_data_paths=(masked,), pack_impl=name)
    assert epoch_samples(config, 8) == (4 if name == "packed" else 3)
