"""The formulas of forgetting against published numbers, and the objective's means against sums written by hand.

tests/training/test_unlearning.py compares whole steps with plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from megatron.data.answers import ANSWER_TOKENS
from megatron.data.batch import StepBatch
from megatron.neox_arguments.schema_post import PostConfig
from megatron.objectives.unlearn import UnlearnObjective, npo, simnpo

pytestmark = pytest.mark.cpu


def test_npo_golden() -> None:
    """beta 0.1, log-ratio 0 and -1: 2 / beta * ln(1 + e^(beta * ratio)), in fp64."""
    ratios = torch.tensor([0.0, -1.0], dtype=torch.float64, requires_grad=True)
    losses = npo(ratios, 0.1)
    assert losses.tolist() == pytest.approx([13.862944, 12.887933], abs=1e-6)
    losses.sum().backward()
    assert ratios.grad is not None
    # The weight with which ascent is damped: 2 pi^beta / (pi^beta + ref^beta), 1 while nothing is forgotten.
    expected = [2 * torch.sigmoid(torch.tensor(0.1 * r, dtype=torch.float64)).item() for r in (0.0, -1.0)]
    assert ratios.grad.tolist() == pytest.approx(expected)


def test_npo_is_ascent_where_beta_is_small() -> None:
    """Zhang et al. 2024, proposition 1: NPO less 2 ln 2 / beta tends to the log-ratio."""
    ratios = torch.tensor([0.3, -2.0], dtype=torch.float64)
    assert (npo(ratios, 1e-6) - 2e6 * torch.log(torch.tensor(2.0, dtype=torch.float64))).tolist() == pytest.approx(
        ratios.tolist(), abs=1e-4
    )


def test_simnpo_is_npo_by_length_without_a_reference() -> None:
    means = torch.tensor([-0.5, -3.0], dtype=torch.float64)
    assert simnpo(means, 2.5, 0.0).tolist() == npo(means, 2.5).tolist()
    assert simnpo(torch.tensor([0.0]), 2.0, 0.0).item() == pytest.approx(0.693147, abs=1e-6)
    assert simnpo(torch.tensor([-1.0]), 2.0, 2.0).item() == pytest.approx(0.693147, abs=1e-6)


# -- the objective on fixed losses, and on mistakes ---------------------------------------------------

KIND = torch.tensor([[0.0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [2, 2, 2, 2]])  # train, forget, forget, retain
MASK = torch.tensor([[1.0, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 1, 1]])
ANSWERS = torch.tensor([[0, 0, 0, 0], [1, 1, 2, 2], [3, 3, 3, 3], [4, 4, 4, 4]])
LOSSES = torch.arange(16, dtype=torch.float32).square().reshape(4, 4) / 20
REFERENCES = -LOSSES.flip(1) / 2
# Of the three answers that are forgotten: -log p of their tokens, and log p of the reference.
ANSWER_LOSSES = [[16 / 20, 25 / 20], [36 / 20, 49 / 20], [81 / 20, 100 / 20]]
REFERENCE_SUMS = [-(49 + 36) / 40, -(25 + 16) / 40, -(100 + 81) / 40]


class Fixed:
    """An output with these losses."""

    def __init__(self, losses: torch.Tensor) -> None:
        self.losses = losses.flatten()

    def token_loss(self, targets: torch.Tensor) -> torch.Tensor:
        return self.losses

    def weighted_loss(self, targets: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.losses * weights.flatten()).sum(), self.losses

    def with_balance(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


def objective(**keys: Any) -> UnlearnObjective:
    return UnlearnObjective(PostConfig(gd_mode=True, gd_retain_weight=3.0, **keys))


def batch_of(kind: torch.Tensor, mask: torch.Tensor, answers: torch.Tensor, rows: int) -> StepBatch:
    """As the loader makes one, in micro-batches of so many rows."""
    parts = [x.reshape(-1, rows, 4) for x in (mask, answers, kind, REFERENCES)]
    mask, answers, kind, references = parts
    numbers = answers - answers.amin(dim=(1, 2), keepdim=True)
    tokens = torch.zeros_like(numbers)
    longest = int(numbers.max()) + 1
    counts = torch.stack(
        [torch.bincount(n[m > 0], minlength=longest) for n, m in zip(numbers, mask, strict=True)]
    ).float()
    extras = {"kind": kind, "reference": references, ANSWER_TOKENS: counts}
    return StepBatch(tokens, tokens, mask, tokens, None, 0, 0, int(mask.sum()), answers=numbers, extras=extras)


def step_loss(one: UnlearnObjective, batch: StepBatch) -> float:
    """What engines make of the micro-batches."""
    terms = len(batch.tokens)
    weights = torch.tensor([terms / count if count else 0.0 for count in one.count(batch)])
    losses = LOSSES.reshape(batch.mask.shape)
    found = [one(cast(Any, Fixed(losses[i])), one.labels(batch, i, weights))[0] for i in range(terms)]
    return float(sum(found)) / terms


def expected(name: str) -> float:
    ordinary, retained = (0 + 1 + 4) / 20 / 3, (144 + 196 + 225) / 20 / 3
    sums = [sum(losses) for losses in ANSWER_LOSSES]
    if name == "ascent":
        forgotten = -sum(sums) / 6
    elif name == "simnpo":
        forgotten = sum(2 / 0.1 * math.log1p(math.exp(-0.1 * loss / 2 + 0.2)) for loss in sums) / 3
    else:
        ratios = [-loss - other for loss, other in zip(sums, REFERENCE_SUMS, strict=True)]
        forgotten = sum(2 / 0.1 * math.log1p(math.exp(0.1 * ratio)) for ratio in ratios) / 3
    return ordinary + 3.0 * retained + forgotten


MISTAKES: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "mask off by one": lambda: (KIND, MASK.roll(1, dims=1), ANSWERS),
    "padding in the sum": lambda: (KIND, torch.ones_like(MASK), ANSWERS),
    "forget and retain swapped": lambda: (torch.tensor([0.0, 2, 1])[KIND.long()], MASK, ANSWERS),
    "retained like trained": lambda: (KIND * (KIND < 2), MASK, ANSWERS),
}


@pytest.mark.parametrize("name", ["ascent", "npo", "simnpo"])
def test_each_kind_is_a_mean_of_its_own_however_rows_are_split(name: str) -> None:
    one = objective(ga_loss=name, ga_gamma=0.2)
    assert list(one.count(batch_of(KIND, MASK, ANSWERS, 4))) == [3, 3, 6, 3]
    for rows in (4, 2, 1):
        assert step_loss(one, batch_of(KIND, MASK, ANSWERS, rows)) == pytest.approx(expected(name), rel=1e-6)
    for mistake, labels in MISTAKES.items():
        assert abs(step_loss(one, batch_of(*labels(), 4)) - expected(name)) > 1e-3, mistake


def test_one_answer_of_two_documents_is_another_npo() -> None:
    merged = torch.where(ANSWERS == 2, 1, ANSWERS)
    for name in ("npo", "simnpo"):
        one = objective(ga_loss=name, ga_gamma=0.2)
        assert abs(step_loss(one, batch_of(KIND, MASK, merged, 4)) - expected(name)) > 1e-3


def test_data_of_an_evaluation_are_ordinary() -> None:
    one, batch = objective(ga_loss="npo"), batch_of(KIND, MASK, ANSWERS, 4)
    bare = replace(batch, extras={ANSWER_TOKENS: batch.extras[ANSWER_TOKENS]})
    assert list(one.count(bare)) == [12, 0, 0, 0]
    mean = float((LOSSES * MASK).sum()) / 12
    assert step_loss(one, bare) == pytest.approx(mean, rel=1e-6)
