"""The scaling rules against published numbers."""

from __future__ import annotations

import math

import pytest

from megatron.recipes.scaling import (
    CHOICES,
    batch_tokens,
    depth,
    learning_rate,
    plan_training,
    run_tokens,
    vocabulary,
    vocabulary_size,
    warmup_steps,
    weight_decay,
)

pytestmark = pytest.mark.cpu

# Optima of an independent grid search with 1.02B tokens (L. Lingle 2025, "Scaling laws for optimal LR and batch size",
# part II): parameters, tokens of a step, rate. Neighbours in the grid are a factor of 2 and of sqrt(2) away.
GRID = [
    (46_006_272, 131_072, 0.003906),
    (109_051_904, 131_072, 0.001953),
    (368_050_176, 131_072, 0.000977),
    (872_415_232, 131_072, 0.000691),
]


@pytest.mark.parametrize(("parameters", "batch", "rate"), GRID)
def test_rate_and_batch_are_those_of_a_grid_search(parameters: int, batch: int, rate: float) -> None:
    tokens = 1_023_934_464
    assert abs(math.log2(learning_rate(parameters, tokens) / rate)) < 0.7
    assert abs(math.log2(batch_tokens(tokens) / batch)) <= 1


def test_the_vocabulary_of_published_models() -> None:
    """Tao et al. 2024: 216 thousand entries for Llama-2 70B (width 8192), about 40 thousand for 3B (3200)."""
    assert vocabulary(68.7e9, 8192) == pytest.approx(216e3, rel=0.02)
    assert vocabulary(2.87e9, 3200) == pytest.approx(40e3, rel=0.08)
    assert vocabulary_size(2.87e9, 3200, 1e12) == 32_768
    assert vocabulary_size(68.7e9, 8192, 1e15) == 65_408  # ids of 16 bits
    assert vocabulary_size(2.87e9, 3200, 1.2e6) == 4096  # 1.2 MB of text has no more
    assert vocabulary_size(1e6, 128, 10) == 512


def test_depth_of_llama() -> None:
    assert depth(4096, 8, 512) == pytest.approx(32, rel=1e-12)


def test_chinchilla_and_its_limits() -> None:
    assert run_tokens(70_000_000_000, 10**13, None, None) == 1.4e12
    assert run_tokens(1000, 100, None, None) == 400  # four epochs
    assert run_tokens(1000, 100, 9000.0, None) == 9000
    assert run_tokens(1000, 10**6, None, 5000.0) == 5000  # hours


def test_the_memory_of_adamw_is_the_published_share_of_the_run() -> None:
    """1 / (rate x decay x steps) = 1.084 (D/N)^-0.527, which at 20 tokens per parameter is 0.2236."""
    decay = weight_decay(1e-3, 100_000, 20)
    assert 1 / (1e-3 * decay * 100_000) == pytest.approx(0.2236, rel=1e-3)
    assert weight_decay(1e-3, 100, 20) == 0.1


def test_warm_up() -> None:
    assert warmup_steps(500_000) == 2000  # LLaMA
    assert warmup_steps(1000) == 40  # 2 / (1 - 0.95)
    assert warmup_steps(100) == 10 and warmup_steps(2) == 1
    assert warmup_steps(100_000, beta2=0.999) == 2000


def test_a_whole_plan() -> None:
    """LLaMA-60M: batch and rate are powers and rules of what is asked, and the run is as long as asked."""
    plan = plan_training(58_073_600, 25_305_088, 1024, 20 * 58_073_600, 10**9)
    assert plan.batch == 64 and plan.tokens == plan.batch * plan.steps * 1024
    assert plan.tokens == pytest.approx(20 * 58_073_600, rel=1e-3)
    assert plan.epochs == pytest.approx(plan.tokens / 1e9)
    short = plan_training(1_000_000, 500_000, 512, 60_000, 60_000)
    assert short.steps >= 50 and short.batch == 2
    assert CHOICES["optimizer"]["params"]["betas"][1] == 0.95  # what the warm-up goes by
