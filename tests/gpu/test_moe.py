"""Mixtures of experts on a GPU, where their products are grouped: recomputed blocks, and inference mode."""

from __future__ import annotations

import pytest
import torch

from megatron.layers.moe.balancing import moe_layers
from megatron.model.sequential import SequentialModel
from megatron.mpu.state import ParallelState
from tests.model.networks import batch, build, tiny
from tests.model.test_moe import EVERYTHING

pytestmark = pytest.mark.gpu


def network(**changes: object) -> SequentialModel:
    return build(tiny(**{**EVERYTHING, **changes}), ParallelState.single("cuda")).to(torch.bfloat16)


def step(model: SequentialModel) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tokens, positions, targets = (x.cuda() for x in batch())
    torch.manual_seed(9)
    loss = model(
        (tokens, positions), (targets, torch.ones_like(targets, dtype=torch.float32), torch.tensor(0.1).cuda())
    )
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def test_bf16_products_are_grouped() -> None:
    layers = moe_layers(network()).values()
    assert layers and all(torch.bfloat16 in layer.experts.grouped for layer in layers)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_step_with_recomputation_is_the_step_without(policy: str) -> None:
    loss, gradients = step(network())
    again, others = step(network(checkpoint_policy=policy))
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(others, gradients)


def test_inference_gives_the_logits_of_one_product_per_expert() -> None:
    tokens, positions, _ = (x.cuda() for x in batch())
    with torch.inference_mode():
        model = network().eval()
        found = model((tokens, positions), then=lambda out: out.logits())
        for layer in moe_layers(model).values():
            assert layer.experts.grouped
            layer.experts.grouped = frozenset()
        expected = model((tokens, positions), then=lambda out: out.logits())
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
