"""muP's coordinate check (known-faults 80): activations keep their size as the width grows, and do not without it."""

from __future__ import annotations

import pytest
import torch

from megatron.layers.carry import Carry
from megatron.mpu.sharding import named_parameters
from tests.model.networks import batch, build, tiny

pytestmark = pytest.mark.cpu

BASE = 32


def _sizes(hidden: int, use_mup: bool) -> tuple[float, float]:
    """Mean size of the final hidden states and of the logits after three Adam steps at the given width."""
    settings = {"use_mup": True, "mup_base_hidden_size": BASE} if use_mup else {}
    model = tiny(hidden_size=hidden, num_kv_heads=4, pos_emb="learned", no_weight_tying=True, **settings)
    network = build(model)
    multiplier = model.mup_width_mult
    groups = {True: [], False: []}
    for _, parameter in named_parameters(network):
        groups[parameter.spec.kind == "matrix"].append(parameter)
    rate = 1e-2
    # Adam under muP: matrices that map width to width learn at rate / m, all else at the rate itself.
    optimizer = torch.optim.Adam(
        [{"params": groups[True], "lr": rate / multiplier}, {"params": groups[False], "lr": rate}]
    )
    tokens, positions, targets = batch(rows=4)
    labels = (targets, torch.ones(targets.shape), torch.tensor([1 / targets.numel()]))
    for _ in range(3):
        optimizer.zero_grad()
        network((tokens, positions), labels)[0].backward()
        optimizer.step()
    with torch.no_grad():
        blocks = network.sequential[1](network.sequential[0](Carry(tokens, positions))).hidden
        return blocks.abs().mean().item(), network((tokens, positions)).logits().abs().mean().item()


def test_coordinates_are_flat_under_mup_only() -> None:
    sizes = {(hidden, mup): _sizes(hidden, mup) for hidden in (BASE, 4 * BASE) for mup in (True, False)}
    for coordinate in (0, 1):
        with_mup = sizes[4 * BASE, True][coordinate] / sizes[BASE, True][coordinate]
        without = sizes[4 * BASE, False][coordinate] / sizes[BASE, False][coordinate]
        assert 0.8 < with_mup < 1.25
        assert without > 1.4
