"""The packed dataset: GPT-NeoX's order, its repairs, and segments that are kept."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.packing.packed import packed_index
from megatron.data.packing.samples import PackedSamples
from megatron.data.tokens.cache import IndexCache
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError
from tests.data.corpus import GOLDEN, write
from tests.data.packing_cases import corpus, packing

pytestmark = pytest.mark.cpu


def golden(folder: Path, **options: object) -> PackedSamples:
    packed = packing("packed", IndexedDataset(write(folder / "golden", GOLDEN)), 8, **options)
    return packed.dataset(packed.segments(6, 1234))


def test_golden_order(tmp_path: Path) -> None:
    dataset = golden(tmp_path)
    arrays = dataset.arrays
    assert arrays["doc_idx"].tolist() == [2, 2, 4, 1, 0, 3, 4, 0, 1, 3]
    assert arrays["sample_idx"].tolist() == [
        [0, 0], [2, 2], [3, 3], [4, 2], [5, 5], [6, 1], [7, 2], [8, 5], [9, 4],
    ]  # fmt: skip
    assert arrays["shuffle_idx"].tolist() == [7, 5, 6, 0, 4, 3, 2, 1]
    assert [arrays[name].dtype for name in ("doc_idx", "sample_idx", "shuffle_idx")] == [np.int32, np.int32, np.uint32]
    assert dataset[0].tokens.tolist() == [10, 10, 10, 10, 20, 21, 22, 23, 24]
    assert dataset[3].tokens.tolist() == [7, 8, 9, 7, 8, 9, 40, 41, 42]
    assert dataset[3].starts.tolist() == [0, 3, 6]
    assert dataset[0].starts.tolist() == [4]


def test_every_sample_counts(tmp_path: Path) -> None:
    """NeoX reports 7 of these 8 samples; here the last one exists too, and nothing wraps around."""
    dataset = golden(tmp_path)
    assert len(dataset) == 8
    assert dataset[7].tokens.tolist() == [42, 43, 44, 45, 46, 10, 10, 10, 10]
    for index in (8, -1):
        with pytest.raises(IndexError, match="of 8"):
            dataset[index]


def test_samples_have_one_token_more_and_share_it(tmp_path: Path) -> None:
    """In stream order the last target of a sample is the first input of the next."""
    dataset = golden(tmp_path)
    order = np.argsort(dataset.arrays["shuffle_idx"])
    samples = [dataset[int(i)].tokens for i in order]
    assert all(len(sample) == 9 for sample in samples)
    assert all(a[-1] == b[0] for a, b in itertools.pairwise(samples))


def test_epochs_of_small_data() -> None:
    with corpus([9]) as (data, _):
        packed = packing("packed", data, 4)
        assert packed.samples_per_epoch() == 2
        assert [packed.segments(samples, 1)[0].epochs for samples in (0, 2, 3)] == [1, 1, 2]
    with corpus([4]) as (data, _):
        assert packing("packed", data, 4).samples_per_epoch() == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 50), st.integers(1, 20), st.integers(0, 200))
def test_epochs_are_the_fewest(tokens: int, seq: int, samples: int) -> None:
    seq = min(seq, tokens - 1)
    with corpus([tokens]) as (data, _):
        (segment,) = packing("packed", data, seq).segments(samples, 1)
    assert segment.samples == (segment.epochs * tokens - 1) // seq >= samples
    assert segment.epochs == 1 or ((segment.epochs - 1) * tokens - 1) // seq < samples


@pytest.mark.parametrize("tokens", [0, 4])
def test_too_few_tokens_is_an_error_not_an_endless_loop(tokens: int) -> None:
    with corpus([tokens]) as (data, _), pytest.raises(UserError, match=f"corpus: {tokens} tokens.*at least 5 tokens"):
        packing("packed", data, 4).segments(10, 1, what="corpus")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 6), st.integers(1, 30), st.integers(0, 99))
def test_every_token_once_per_epoch(sizes: list[int], seq: int, samples: int, seed: int) -> None:
    total = sum(sizes)
    if total < seq + 1:
        return
    with corpus(sizes) as (data, _):
        (segment,) = packing("packed", data, seq).segments(samples, seed)
    arrays = packed_index(np.asarray(sizes, np.int32), (0, len(sizes)), seq, segment)
    assert np.bincount(arrays["doc_idx"], minlength=len(sizes)).tolist() == [segment.epochs] * len(sizes)
    assert sorted(arrays["shuffle_idx"].tolist()) == list(range(segment.samples))
    before = np.concatenate([[0], np.cumsum(np.asarray(sizes)[arrays["doc_idx"]])])
    starts = before[arrays["sample_idx"][:, 0]] + arrays["sample_idx"][:, 1]
    assert starts.tolist() == [k * seq for k in range(segment.samples + 1)]
    assert segment.epochs * total - 1 - starts[-1] < seq  # less than one sample is left over


def test_a_range_of_documents(tmp_path: Path) -> None:
    packed = packing("packed", IndexedDataset(write(tmp_path / "x", GOLDEN)), 4, documents=(2, 4))
    dataset = packed.dataset(packed.segments(20, 7))
    seen = {int(token) for i in range(len(dataset)) for token in dataset[i].tokens}
    assert seen == {7, 8, 9, *range(20, 32)}


def test_empty_documents_are_passed_over(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "x", [[], [1, 2], [], [3, 4, 5], []]))
    packed = packing("packed", data, 2)
    dataset = packed.dataset(packed.segments(2, 3))
    for i in range(len(dataset)):
        sample = dataset[i]
        assert len(sample.tokens) == 3
        assert all(sample.tokens[start] in (1, 3) for start in sample.starts)


def test_training_longer_appends_and_keeps_the_past(tmp_path: Path) -> None:
    packed = packing("packed", IndexedDataset(write(tmp_path / "x", GOLDEN)), 8)
    first = packed.segments(6, 1234)
    longer = packed.segments(20, 1234, first)
    assert longer[: len(first)] == first
    assert len(longer) == 2
    assert longer[1].seed != first[0].seed
    assert packed.segments(8, 1234, first) == first  # all 8 samples of the first are used before
    assert packed.segments(2, 1234, first) == first
    short = packed.dataset(first)
    long = packed.dataset(longer)
    assert len(long) >= 20
    for i in range(len(short)):
        assert np.array_equal(short[i].tokens, long[i].tokens)
    further = packed.segments(60, 1234, longer)
    assert further[:2] == longer
    assert len({segment.seed for segment in further}) == 3
    # The appended segment is read from its own arrays, from its first sample on.
    alone = packed.dataset(longer[1:])
    assert np.array_equal(long[8].tokens, alone[0].tokens)
    # Rebuilding for 20 samples instead would have changed the past.
    rebuilt = packed.dataset(packed.segments(20, 1234))
    assert any(not np.array_equal(rebuilt[i].tokens, short[i].tokens) for i in range(6))


def test_labels_stay_with_their_tokens(tmp_path: Path) -> None:
    masked = [[token if token % 2 else -100 for token in document] for document in GOLDEN]
    labels = IndexedDataset(write(tmp_path / "labels", masked, np.int32))
    dataset = golden(tmp_path, labels=labels)
    for i in range(len(dataset)):
        sample = dataset[i]
        assert sample.labels.tolist() == [token if token % 2 else -100 for token in sample.tokens]


def test_key_follows_sizes_range_and_length(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "a", GOLDEN))
    same = IndexedDataset(write(tmp_path / "b", [[0] * len(document) for document in GOLDEN]))
    other = IndexedDataset(write(tmp_path / "c", GOLDEN[::-1]))

    def key(dataset: IndexedDataset, seq: int = 8, documents: tuple[int, int] = (0, 5)) -> str:
        return packing("packed", dataset, seq, documents=documents).key

    assert key(data) == key(same)
    assert len({key(data), key(other), key(data, 7), key(data, 8, (1, 5))}) == 4


def test_cached_and_built_in_memory_agree(tmp_path: Path) -> None:
    cached = golden(tmp_path, cache=IndexCache(tmp_path / "cache"))
    again = golden(tmp_path, cache=IndexCache(tmp_path / "cache"))
    memory = golden(tmp_path)
    for i in range(8):
        assert np.array_equal(cached[i].tokens, memory[i].tokens)
        assert np.array_equal(again[i].tokens, memory[i].tokens)
