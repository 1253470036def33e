"""Both index builders (compiled and numpy) against golden vectors and against the rule written as a plain loop."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import index_builders
from megatron.data.index_builders import build_blend, build_sample_index, fallback, index_dtype

pytestmark = pytest.mark.cpu

BUILDERS = [fallback] + ([index_builders._native] if index_builders._native is not None else [])


@pytest.fixture(params=BUILDERS, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def builder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(index_builders, "builders", lambda: request.param)
    return request.param


def walk(sizes: list[int], doc_idx: list[int], seq: int, samples: int) -> list[tuple[int, int]]:
    """GPT-NeoX's walk, step by step: read seq + 1 tokens, the next sample begins at the last of them."""
    rows, position, offset = [(0, 0)], 0, 0
    for _ in range(samples):
        remaining = seq + 1
        while True:
            length = sizes[doc_idx[position]] - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - 1
                break
            position, offset = position + 1, 0
        rows.append((position, offset))
    return rows


def greedy(weights: list[float], samples: int) -> list[tuple[int, int]]:
    """Blending as a plain loop over numpy scalars."""
    taken, chosen = np.zeros(len(weights)), []
    for i in range(samples):
        best = int(np.argmax(np.asarray(weights) * max(i, 1) - taken))
        chosen.append((best, int(taken[best])))
        taken[best] += 1
    return chosen


def test_which_builder_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_builders, "_native", None)
    assert index_builders.builders() is fallback


def test_golden_sample_index(builder: ModuleType) -> None:
    sizes = np.asarray([5, 9, 3, 12, 7], np.int32)
    rows = build_sample_index(sizes, np.asarray([2, 2, 4, 1, 0, 3, 4, 0, 1, 3], np.int32), 8, 8)
    assert rows.tolist() == [[0, 0], [2, 2], [3, 3], [4, 2], [5, 5], [6, 1], [7, 2], [8, 5], [9, 4]]
    assert rows.dtype == np.int32


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 7), st.integers(0, 5), st.data())
def test_sample_index_is_the_walk(dtype: type, sizes: list[int], seq: int, fewer: int, data: st.DataObject) -> None:
    doc_idx = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=30))
    total = sum(sizes[document] for document in doc_idx)
    samples = max(0, (total - 1) // seq - fewer)
    expected = np.asarray(walk(sizes, doc_idx, seq, samples))
    for module in BUILDERS:
        for chunk in (1, 3, 1 << 16):
            out = np.empty((samples + 1, 2), np.int32 if chunk == 3 else np.int64)
            fallback_chunk, fallback.CHUNK = fallback.CHUNK, chunk
            module.sample_index(np.asarray(sizes, np.int32), np.asarray(doc_idx, dtype), seq, out)
            fallback.CHUNK = fallback_chunk
            assert np.array_equal(out, expected)


def test_unaligned_sizes_of_a_mapped_file(builder: ModuleType) -> None:
    raw = b"xx" + np.asarray([5, 9, 3, 12, 7], np.int32).tobytes()
    sizes = np.frombuffer(raw, np.int32, 5, 2)
    rows = build_sample_index(sizes, np.asarray([2, 2, 4, 1], np.int32), 8, 2)
    assert rows.tolist() == [[0, 0], [2, 2], [3, 3]]


def test_too_few_tokens(builder: ModuleType) -> None:
    sizes, doc_idx = np.asarray([4, 5], np.int32), np.asarray([0, 1], np.int32)
    assert build_sample_index(sizes, doc_idx, 4, 2).tolist() == [[0, 0], [1, 0], [1, 4]]
    with pytest.raises(ValueError, match="too few tokens"):
        build_sample_index(sizes, doc_idx, 4, 3)


def test_documents_beyond_2_gib_tokens_in_sum(builder: ModuleType) -> None:
    """The token count passes 2^31 while every single value stays small."""
    sizes = np.asarray([2**30, 2**30, 2**30, 2**31 - 1], np.int32)
    rows = build_sample_index(sizes, np.arange(4, dtype=np.int32), 2**30, 4)
    assert rows.tolist() == [[0, 0], [1, 0], [2, 0], [3, 0], [3, 2**30]]


@pytest.mark.parametrize(
    ("largest", "samples", "expected"),
    [
        (10, 10, np.int32),
        (2**31 - 1, 5, np.int32),
        (2**31, 5, np.int64),
        (5, 2**31 - 1, np.int32),
        (5, 2**31, np.int64),
    ],
)
def test_index_type_looks_at_values_and_count(largest: int, samples: int, expected: str) -> None:
    assert index_dtype(largest, samples) == expected


def test_many_documents_need_int64_however_few_the_samples(
    builder: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_builders, "INT32_MAX", 9)  # ten documents stand for 2^31 of them
    sizes = np.full(10, 2, np.int32)
    assert build_sample_index(sizes, np.arange(9, dtype=np.int32), 8, 2).dtype == np.int32
    rows = build_sample_index(sizes, np.arange(10, dtype=np.int64), 8, 2)
    assert rows.dtype == np.int64
    assert rows.tolist() == [[0, 0], [4, 0], [8, 0]]


def test_document_positions_go_up_beyond_int32() -> None:
    """Writing positions around 2^31 with the chosen type keeps them increasing."""
    first = 2**31 - 2
    rows = np.empty(4, index_dtype(first + 3, 4))
    rows[:] = np.arange(first, first + 4)
    assert rows.tolist() == [first, first + 1, first + 2, first + 3]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.89, 0.11], [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
        ([0.5, 0.3, 0.2], [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1, 2, 0, 1, 0, 2, 0, 1, 0]),
    ],
)
def test_golden_blend(builder: ModuleType, weights: list[float], expected: list[int]) -> None:
    source, sample = build_blend(np.asarray(weights), 20)
    assert source.tolist() == expected
    assert source.dtype == np.uint8
    for d in range(len(weights)):
        mine = sample[source == d]
        assert mine.tolist() == list(range(len(mine)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=24), st.integers(0, 300))
def test_blend_is_the_greedy_rule(parts: list[int], samples: int) -> None:
    weights = np.asarray(parts, np.float64) / sum(parts)
    expected = greedy(list(weights), samples)
    for module in BUILDERS:
        source, sample = np.empty(samples, np.uint8), np.empty(samples, np.int64)
        module.blend(weights, source, sample)
        assert list(zip(source.tolist(), sample.tolist(), strict=True)) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1e-4, 0.01, 1, 2, 3, 7, 10, 100]) | st.floats(1e-3, 1), min_size=1, max_size=12),
    st.integers(0, 900),
    st.integers(1, 40),
    st.integers(1, 9),
)
def test_numpy_blends_in_lanes_as_the_loop_does(parts: list[float], samples: int, lane: int, lanes: int) -> None:
    """Also where lanes are too short for wrong guesses to cancel out, and at ties."""
    weights = np.asarray(parts, np.float64) / sum(parts)
    source, sample = np.empty(samples, np.uint8), np.empty(samples, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fallback, "LANE", lane)
        patch.setattr(fallback, "LANES", lanes)
        fallback.blend(weights, source, sample)
    assert list(zip(source.tolist(), sample.tolist(), strict=True)) == greedy(list(weights), samples)


@pytest.mark.parametrize("parts", [[1, 1e-5, 1e-5, 1e-6], [1 / d for d in range(1, 11)]])
def test_a_long_blend_in_numpy(parts: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more positions than advance together."""
    monkeypatch.setattr(fallback, "LANES", 64)
    weights, samples = np.asarray(parts) / sum(parts), 150_000
    source, sample = np.empty(samples, np.uint8), np.empty(samples, np.int64)
    fallback.blend(weights, source, sample)
    taken = [0.0] * len(parts)
    for i in range(samples):
        scale = float(max(i, 1))
        owed = [weight * scale - count for weight, count in zip(weights.tolist(), taken, strict=True)]
        best = owed.index(max(owed))
        if source[i] != best or sample[i] != taken[best]:
            pytest.fail(f"position {i}: source {source[i]}, its sample {sample[i]}; wanted {best}, {taken[best]}")
        taken[best] += 1


def test_blend_of_many_sources(builder: ModuleType) -> None:
    weights = np.full(300, 1 / 300)
    source, _ = build_blend(weights, 600)
    assert source.dtype == np.uint16
    assert source[:300].tolist() == list(range(300))
