"""Mixtures: weights, the golden blend, and indices that never wrap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.order.mixture import Mixture, normalize_weights, samples_to_ask, weights_by_documents
from megatron.data.order.phases import Phase
from megatron.data.tokens.cache import IndexCache
from megatron.errors import UserError

pytestmark = pytest.mark.cpu


class Numbers:
    """A source whose sample i is (name, i)."""

    def __init__(self, name: str, length: int) -> None:
        self.name, self.length = name, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[str, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.name, index


def constant(*weights: float) -> list[Phase]:
    return [Phase.constant(weights)]


def test_golden_draws() -> None:
    mixture = Mixture([Numbers("a", 20), Numbers("b", 20)], constant(0.89, 0.11), 20)
    assert [mixture.draw(i)[0] for i in range(20)] == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert mixture[10] == ("b", 1)
    assert mixture[11] == ("a", 9)
    assert mixture.taken == [17, 3]
    assert len(mixture) == 20
    for index in (20, -1):
        with pytest.raises(IndexError, match="of a mixture of 20"):
            mixture[index]


def test_weights_from_documents_golden() -> None:
    assert weights_by_documents([10, 90], 0.3) == pytest.approx([0.8232, 0.1768], abs=5e-5)
    assert weights_by_documents([5], 0.3) == [1.0]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=12), st.integers(1, 400))
def test_a_source_never_gives_more_than_it_was_asked_for(raw: list[float], samples: int) -> None:
    weights = normalize_weights(raw, len(raw), "train_data_weights")
    assert sum(weights) == pytest.approx(1)
    asked = [samples_to_ask(samples, weight) for weight in weights]
    mixture = Mixture([Numbers(str(d), count) for d, count in enumerate(asked)], constant(*weights), samples)
    assert sum(mixture.taken) == samples
    seen = {mixture[i] for i in range(samples)}
    assert len(seen) == samples  # nothing twice


def test_a_longer_mixture_continues_a_shorter_one() -> None:
    weights = normalize_weights([3, 2, 2], 3, "w")
    sources = [Numbers(name, 100) for name in "abc"]
    short, long = Mixture(sources, constant(*weights), 30), Mixture(sources, constant(*weights), 100)
    assert [short[i] for i in range(30)] == [long[i] for i in range(30)]


def test_weight_zero_is_never_drawn() -> None:
    mixture = Mixture([Numbers("a", 0), Numbers("b", 5), Numbers("c", 5)], constant(0.0, 0.5, 0.5), 10)
    assert mixture.taken == [0, 5, 5]
    assert {mixture[i][0] for i in range(10)} == {"b", "c"}


def test_too_short_a_source_is_an_error_at_start() -> None:
    with pytest.raises(ValueError, match="source 0 has 3 samples, but 5"):
        Mixture([Numbers("a", 3), Numbers("b", 9)], constant(0.5, 0.5), 10)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], [0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0]])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(UserError, match="train_data_weights"):
        normalize_weights(weights, 2, "train_data_weights")


def test_default_weights_are_equal() -> None:
    assert normalize_weights(None, 4, "w") == [0.25] * 4


def test_the_blend_is_kept(tmp_path: Path) -> None:
    sources = [Numbers("a", 50), Numbers("b", 50)]
    first = Mixture(sources, constant(0.5, 0.5), 40, IndexCache(tmp_path))
    again = Mixture(sources, constant(0.5, 0.5), 40, IndexCache(tmp_path))
    assert again._blends[0]._arrays is not None
    assert isinstance(again._blends[0]._arrays["source"], np.memmap)
    assert [first[i] for i in range(40)] == [again[i] for i in range(40)]
    assert again.taken == [20, 20]
