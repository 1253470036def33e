"""Sampling rules on distributions small enough to work out by hand."""

import math

import pytest
import torch

from megatron.errors import UserError
from megatron.inference.sampling import Draws, Sampling, keep_top_k, keep_top_p, next_tokens

pytestmark = pytest.mark.cpu

PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])
LOGITS = PROBABILITIES.log()[None]


def frequencies(sampling, draws=20000):
    uniform = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = next_tokens(LOGITS.expand(draws, -1), sampling, uniform)
    return torch.bincount(tokens, minlength=4) / draws


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.0), (40, 0.0), (40, 0.9)])
def test_temperature_zero_is_greedy_whatever_the_filters(seed, top_k, top_p):
    logits = torch.tensor([[0.0, 0.1, 0.05]]).expand(64, -1)
    picked = next_tokens(logits, Sampling(0.0, top_k, top_p), Draws(seed, range(64)).next())
    assert picked.tolist() == [1] * 64


def test_plain_sampling_follows_the_distribution():
    torch.testing.assert_close(frequencies(Sampling(1.0)), PROBABILITIES, atol=0.015, rtol=0)


def test_temperature_sharpens():
    expected = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    torch.testing.assert_close(frequencies(Sampling(0.5)), expected, atol=0.015, rtol=0)


def test_top_k_keeps_the_best():
    expected = torch.tensor([0.5, 0.3, 0.0, 0.0]) / 0.8
    torch.testing.assert_close(frequencies(Sampling(1.0, top_k=2)), expected, atol=0.015, rtol=0)


@pytest.mark.parametrize(("p", "kept"), [(0.4, 1), (0.5, 1), (0.6, 2), (0.79, 2), (0.81, 3), (0.96, 4), (0.01, 1)])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p, kept):
    assert int(torch.isfinite(keep_top_p(LOGITS, p)).sum()) == kept


def test_top_k_larger_than_the_vocabulary_keeps_everything():
    assert torch.isfinite(keep_top_k(LOGITS, 99)).all()


def test_order_of_filters_is_k_then_p():
    # After top_k=2 the two left have 0.625 and 0.375, so top_p=0.6 leaves one.
    assert frequencies(Sampling(1.0, top_k=2, top_p=0.6))[0] == 1.0


@pytest.mark.parametrize(
    ("values", "key"), [((-1.0, 0, 0.0), "temperature"), ((1.0, -3, 0.0), "top_k"), ((1.0, 0, 1.5), "top_p")]
)
def test_values_out_of_range_name_the_key(values, key):
    with pytest.raises(UserError, match=key):
        Sampling(*values)


def test_math_reference_of_temperature():
    sampled = frequencies(Sampling(2.0))
    weights = [math.sqrt(p) for p in PROBABILITIES.tolist()]
    torch.testing.assert_close(sampled, torch.tensor(weights) / sum(weights), atol=0.015, rtol=0)


def test_extreme_draws_never_pick_a_token_without_probability():
    logits = torch.tensor([[-1e9, 0.0, -1e9, 0.0, -1e9]]).expand(2, -1)
    draws = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert next_tokens(logits, Sampling(1.0, top_k=2), draws).tolist() == [1, 3]


def test_draws_depend_on_seed_and_number_alone():
    both = Draws(7, [3, 5])
    alone, other_seed = Draws(7, [5]), Draws(8, [5])
    first, second = both.next(), both.next()
    assert alone.next()[0] == first[1] and alone.next()[0] == second[1]
    assert first[0] != first[1] != second[1] and other_seed.next()[0] != first[1]
