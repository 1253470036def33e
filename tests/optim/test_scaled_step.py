"""Clipping and skipping inside an optimizer's step: what it does to weights, moments and update counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.neox_arguments.optimizer_params import optimizer_params
from megatron.optim.optimizers import build_optimizer
from megatron.optim.scaled_step import scaled_step

pytestmark = pytest.mark.cpu

FUSED = {"adam": {"params": {"betas": [0.9, 0.95], "eps": 1e-8}}}
OTHERS = {"lion": {}, "sgd": {"params": {"momentum": 0.9}}, "madgrad_wd": {}, "sm3": {}}
NO, YES = torch.zeros(()), torch.ones(())


def built(kind: str, params: dict[str, Any]) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6))
    groups = [{"params": [weight], "weight_decay": 0.1}]
    return weight, build_optimizer(kind, groups, 0.01, optimizer_params(kind, params))


def tensors(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The weight and all of the optimizer's state."""
    state = {k: torch.as_tensor(v).detach().clone() for k, v in optimizer.state[weight].items()}
    return {"weight": weight.detach().clone(), **state}


@pytest.mark.parametrize(("kind", "params"), [*FUSED.items(), *OTHERS.items()])
def test_a_scale_acts_on_the_gradient_and_found_inf_leaves_everything_alone(kind: str, params: dict[str, Any]) -> None:
    weight, optimizer = built(kind, params)
    other_weight, other = built(kind, params)
    for step in range(3):
        gradient = torch.full_like(weight, 4.0 + step)
        weight.grad, other_weight.grad = gradient.clone(), gradient / 4
        scaled_step(optimizer, torch.tensor(0.25), NO)
        scaled_step(other, None, NO)  # 1/4 is a power of two: both ways round alike
    before = tensors(weight, optimizer)
    expected = tensors(other_weight, other)
    assert before.keys() == expected.keys() and all(torch.equal(before[k], expected[k]) for k in before)
    for scale in (torch.tensor(0.25), torch.tensor(torch.nan), None):
        weight.grad = torch.full_like(weight, torch.nan)
        scaled_step(optimizer, scale, YES)
        after = tensors(weight, optimizer)
        assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    weight.grad, other_weight.grad = torch.ones_like(weight), torch.ones_like(weight)
    scaled_step(optimizer, None, NO)  # neither the scale nor the flag of a step is left for the next one
    other.step()
    after, expected = tensors(weight, optimizer), tensors(other_weight, other)
    assert all(torch.equal(after[k], expected[k]) for k in after)


def test_adam_reads_the_scale_in_its_kernel_and_counts_the_updates_it_takes() -> None:
    weight, optimizer = built("adam", FUSED["adam"])
    weight.grad = torch.full_like(weight, 8.0)
    scaled_step(optimizer, torch.tensor(0.25), NO)
    assert optimizer.state[weight]["exp_avg"].unique().tolist() == pytest.approx([0.1 * 8.0 / 4])
    scaled_step(optimizer, None, YES)
    assert float(optimizer.state[weight]["step"]) == 1.0
    assert getattr(optimizer, "_step_supports_amp_scaling", False)
