"""Initialisations: the spread their formulas promise, orthogonality, and muP's widths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.layers.init import INITS, InitScale, build_init
from tests.model.networks import tiny

pytestmark = pytest.mark.cpu

HIDDEN, LAYERS, STD = 64, 12, 0.05
SCALE = InitScale(STD, LAYERS, HIDDEN)
SHAPE = (192, 128)

SPREAD = {
    "normal": STD,
    "scaled_normal": STD / math.sqrt(2 * LAYERS),
    "single_residual_scaled_normal": STD / math.sqrt(LAYERS),
    "small_init": math.sqrt(2 / (5 * HIDDEN)),
    "wang_init": 2 / (LAYERS * math.sqrt(HIDDEN)),
    "xavier_uniform": math.sqrt(2 / sum(SHAPE)),
    "xavier_normal": math.sqrt(2 / sum(SHAPE)),
}


def _filled(name: str, scale: InitScale = SCALE, shape: tuple[int, int] = SHAPE, hidden: bool = True) -> torch.Tensor:
    tensor = torch.full(shape, torch.nan)
    INITS[name](scale, hidden)(tensor, torch.Generator().manual_seed(0))
    return tensor


@pytest.mark.parametrize("name", SPREAD)
def test_spread(name: str) -> None:
    values = _filled(name)
    # The standard deviation of n samples is known to about 1 / sqrt(2n): 0.45 % here; 5 of those.
    assert values.std().item() == pytest.approx(SPREAD[name], rel=0.023)
    assert abs(values.mean().item()) < 5 * SPREAD[name] / math.sqrt(values.numel())
    if name == "xavier_uniform":
        assert values.abs().max() <= math.sqrt(6 / sum(SHAPE))


@pytest.mark.parametrize(("name", "gain"), [("orthogonal", 1.0), ("scaled_orthogonal", math.sqrt(2 / LAYERS))])
@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_orthogonal(name: str, gain: float, shape: tuple[int, int]) -> None:
    values = _filled(name, shape=shape).double()
    small = values.T @ values if shape[0] > shape[1] else values @ values.T
    assert (small - gain**2 * torch.eye(24)).abs().max() < 1e-5


def test_every_entry_is_tested_and_draws_only_from_its_generator() -> None:
    assert set(INITS) == set(SPREAD) | {"orthogonal", "scaled_orthogonal"}
    for name in INITS:
        torch.manual_seed(1)
        first = _filled(name)
        torch.manual_seed(2)
        assert torch.equal(first, _filled(name))


@pytest.mark.parametrize(
    ("name", "hidden_matrix", "other"),
    [("normal", 1 / 2, 1.0), ("scaled_normal", 1 / 2, 1.0), ("small_init", 1.0, 2.0), ("wang_init", 1.0, 2.0)],
)
def test_mup_matrices_shrink_with_the_width_and_embeddings_do_not(
    name: str, hidden_matrix: float, other: float
) -> None:
    """At four times the base width: hidden matrices go as 1/sqrt(width), the rest stays as at the base width."""
    wide = InitScale(STD, LAYERS, HIDDEN, width=4.0)
    for hidden, factor in ((True, hidden_matrix), (False, other)):
        ratio = _filled(name, wide, hidden=hidden).std() / _filled(name, SCALE, hidden=hidden).std()
        assert ratio.item() == pytest.approx(factor, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "residual", "std"),
    [
        ({}, False, 0.02),
        ({}, True, 0.02 / 2),  # scaled_normal, 2 layers
        ({"init_method": "small_init"}, False, math.sqrt(2 / 160)),
        ({"output_layer_init_method": "wang_init"}, True, 2 / (2 * math.sqrt(32))),
        ({"init_method_std": 0.5}, False, 0.5),
        ({"use_mup": True, "mup_base_hidden_size": 8, "mup_init_scale": 3.0}, False, 3 * 0.02 / 2),
        ({"mup_init_scale": 3.0}, False, 0.02),
    ],
)
def test_config_keys(changes: dict[str, Any], residual: bool, std: float) -> None:
    tensor = torch.empty(256, 128)
    build_init(tiny(**changes), residual=residual)(tensor, torch.Generator().manual_seed(0))
    assert tensor.std().item() == pytest.approx(std, rel=0.02)
