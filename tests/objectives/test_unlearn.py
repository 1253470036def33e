"""The formulas of forgetting against published numbers; the objective's means are held by tests/training."""

from __future__ import annotations

import pytest
import torch

from megatron.objectives.unlearn import npo, simnpo

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
