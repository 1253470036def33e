"""`train_impl: normal`: sum over trained tokens / their number, whatever the split (known-faults 8)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.errors import UserError
from megatron.objectives import OBJECTIVES
from tests.model.networks import batch, build, logits, tiny

pytestmark = pytest.mark.cpu


def test_registered_by_train_impl() -> None:
    assert OBJECTIVES["normal"].counts == ("tokens",) and OBJECTIVES["normal"].metrics == ()
    with pytest.raises(UserError, match="train_impl"):
        OBJECTIVES["nomal"]


def test_known_fault_8_tokens_count_alike_in_every_micro_batch() -> None:
    """One token of loss 4 in one micro-batch, three of loss 2 in another: 2.5, not the mean of means 3.0."""

    class Fixed:
        def __init__(self, losses: list[float]) -> None:
            self.losses = torch.tensor(losses)

        def weighted_loss(self, targets: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (self.losses * weights.flatten()).sum(), self.losses

        def with_balance(self, loss: torch.Tensor) -> torch.Tensor:
            return loss  # no layer adds to it

    targets = torch.zeros(1, 3, dtype=torch.int64)
    weights = torch.tensor([2 / 4])  # two micro-batches, one rank, four trained tokens
    objective = OBJECTIVES["normal"]()
    first, _ = objective(Fixed([4.0, 9.0, 9.0]), (targets, torch.tensor([[1.0, 0.0, 0.0]]), weights))
    second, _ = objective(Fixed([2.0, 2.0, 2.0]), (targets, torch.ones(1, 3), weights))
    assert ((first + second) / 2).item() == pytest.approx(2.5)


def test_split_into_micro_batches_with_different_token_counts() -> None:
    tokens, positions, targets = batch(rows=4)
    mask = torch.ones(targets.shape)
    mask[0, 3:] = 0
    mask[2] = 0  # a micro-batch without trained tokens, when rows are fed one by one
    count = mask.sum()

    whole = build(tiny())
    expected = F.cross_entropy(logits(whole, tokens, positions).flatten(0, 1), targets.flatten(), reduction="none")
    expected = (expected * mask.flatten()).sum() / count
    expected.backward()

    for rows in (4, 2, 1):
        network = build(tiny())
        steps = 4 // rows
        total = torch.zeros(())
        for i in range(0, 4, rows):
            part = slice(i, i + rows)
            weights = (steps / count).reshape(1)
            loss, _ = network((tokens[part], positions[part]), (targets[part], mask[part], weights))
            assert loss.isfinite()
            (loss / steps).backward()
            total += loss.detach() / steps
        assert total.item() == pytest.approx(expected.item(), rel=1e-5)
        for mine, reference in zip(network.parameters(), whole.parameters(), strict=True):
            assert (mine.grad - reference.grad).abs().max() < 1e-6
