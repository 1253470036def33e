"""Optimizers against their published formulas in fp64, and the rule for decay groups."""

import numpy as np
import pytest
import torch

from megatron.errors import UserError
from megatron.mpu.sharding import ParamSpec, parameter, zeros
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.optimizer_params import optimizer_params
from megatron.optim.groups import parameter_groups
from megatron.optim.optimizers import build_optimizer

pytestmark = pytest.mark.cpu

GRADIENTS = np.random.RandomState(0).randn(5, 4)


def run(kind, params, decay, lr=0.1):
    """Five steps on the fixed gradients, from ones."""
    weight = torch.nn.Parameter(torch.ones(4))
    groups = [{"params": [weight], "weight_decay": decay, "lr_mult": 1.0}]
    optimizer = build_optimizer(kind, groups, lr, params)
    for gradient in GRADIENTS:
        weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
    return weight.detach().numpy()


@pytest.mark.parametrize("kind", ["Adam", "adamw", "cpu_torch_adam"])
def test_adam_decays_decoupled(kind):
    w, m, v = np.ones(4), np.zeros(4), np.zeros(4)
    for t, g in enumerate(GRADIENTS, start=1):
        w = w * (1 - 0.1 * 0.01)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w = w - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    np.testing.assert_allclose(run(kind, {"betas": [0.9, 0.95], "eps": 1e-8}, 0.01), w, rtol=2e-6)


def test_lion():
    w, m = np.ones(4), np.zeros(4)
    for g in GRADIENTS:
        w = w * (1 - 0.1 * 0.01) - 0.1 * np.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    np.testing.assert_allclose(run("lion", optimizer_params("lion", {}), 0.01), w, rtol=2e-6)


def test_sgd_with_momentum():
    w, m = np.ones(4), np.zeros(4)
    for g in GRADIENTS:
        m = 0.9 * m + g
        w = w - 0.1 * m
    np.testing.assert_allclose(run("SGD", {"momentum": 0.9, "nesterov": False}, 0.0), w, rtol=2e-6)


def test_unknown_optimizer_lists_the_choices():
    with pytest.raises(UserError, match=r"optimizer.type: 'adem' is not known. Did you mean 'adam'"):
        run("adem", {}, 0.0)


def test_a_stage_without_parameters_is_an_error():
    with pytest.raises(UserError, match="no parameters to train"):
        build_optimizer("adam", [], 0.1, {})


def test_weights_decay_and_vectors_do_not():
    state = ParallelState.single()
    matrix = parameter(ParamSpec(shape=(2, 3), init=zeros), state)
    embedding = parameter(ParamSpec(shape=(5, 3), init=zeros, kind="embedding"), state)
    bias = parameter(ParamSpec(shape=(3,), init=zeros), state)
    groups = parameter_groups([matrix, embedding, bias], weight_decay=0.1, matrix_lr_mult=0.5)
    found = {id(p): (g["weight_decay"], g["lr_mult"]) for g in groups for p in g["params"]}
    assert found == {id(matrix): (0.1, 0.5), id(embedding): (0.1, 1.0), id(bias): (0.0, 1.0)}
