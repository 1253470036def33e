"""The head's output: losses without logits, logits without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.networks import VOCAB, batch, build, logits, tiny

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("changes", [{}, {"no_weight_tying": True}, {"loss_chunk_size": 5}], ids=str)
def test_token_loss_is_the_cross_entropy_of_the_logits(changes: dict[str, Any]) -> None:
    network = build(tiny(init_method_std=0.3, **changes))
    tokens, positions, targets = batch()
    expected = F.cross_entropy(
        logits(network, tokens, positions).flatten(0, 1).double(), targets.flatten(), reduction="none"
    )
    out = network((tokens, positions))
    losses = out.token_loss(targets)
    assert losses.dtype == torch.float32
    assert (losses - expected).abs().max() < 1e-5
    weights = torch.rand(targets.shape)
    total, detached = out.weighted_loss(targets, weights)
    assert total.item() == pytest.approx((expected * weights.flatten()).sum().item(), rel=1e-5)
    assert (detached - expected).abs().max() < 1e-5


def test_last_logits_and_shapes() -> None:
    network = build(tiny()).eval()
    tokens, positions, _ = batch(rows=3)
    out = network((tokens, positions))
    full = out.logits()
    assert full.shape == (3, 16, VOCAB)
    assert full.dtype == torch.float32
    assert torch.allclose(out.last_logits(), full[:, -1], atol=1e-6)
    assert torch.allclose(out.logits(last=4), full[:, -4:], atol=1e-6)
    assert out.hidden.shape == (48, 32)


def test_mup_divides_logits_by_the_width_multiplier() -> None:
    tokens, positions, targets = batch()
    model = tiny(use_mup=True, mup_base_hidden_size=8, init_method_std=0.3)
    network = build(model)
    assert network((tokens, positions)).multiplier == pytest.approx(1 / 4)
    out = network((tokens, positions))
    plain = out.hidden @ out.weight[:VOCAB].T / 4
    assert torch.allclose(out.logits().flatten(0, 1), plain, atol=1e-5)
    expected = F.cross_entropy(plain, targets.flatten(), reduction="none")
    assert torch.allclose(out.token_loss(targets), expected, atol=1e-5)


class _RowsOfVocabularyWidth(TorchDispatchMode):
    """Numbers of rows of all tensors [rows, v] that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] in (VOCAB, 128):
            self.rows.add(out.shape[0])
        return out


def test_training_never_holds_the_logits() -> None:
    """Chunks of 4 tokens are made, never all 48."""
    network = build(tiny(loss_chunk_size=4, no_weight_tying=True, intermediate_size=40))
    tokens, positions, targets = batch(rows=3)
    with _RowsOfVocabularyWidth() as made:
        network((tokens, positions), (targets, torch.ones(targets.shape), torch.tensor([1.0])))[0].backward()
    assert 4 in made.rows
    assert 48 not in made.rows
