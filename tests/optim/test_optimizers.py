"""Optimizers against their published formulas in fp64, and the rule for decay groups."""

import numpy as np
import pytest
import torch

from megatron.errors import UserError
from megatron.mpu.sharding import ParamSpec, parameter, zeros
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.optimizer_params import optimizer_params
from megatron.neox_arguments.parameter_rules import parse_rules
from megatron.optim.groups import freeze_parameters, parameter_groups
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


@pytest.mark.parametrize("kind", ["Adam", "adamw", "cpu_torch_adam", "cpu_adam"])
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


@pytest.mark.parametrize(("momentum", "beta"), [(0.0, 0.0), (0.9, 0.95)])
def test_sm3_bounds_second_moments_by_rows_and_columns(momentum, beta):
    """The accumulators of rows and columns themselves, as published and in GPT-NeoX; a vector has one per entry."""
    gradients = np.random.RandomState(1).randn(6, 3, 4)
    params = {"momentum": momentum, "beta": beta, "eps": 1e-30}
    weight, vector = torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(4))
    groups = [{"params": [weight, vector], "weight_decay": 0.3, "lr_mult": 1.0}]
    optimizer = build_optimizer("SM3", groups, 0.1, params)
    w, buffer, rows, columns = np.ones((3, 4)), np.zeros((3, 4)), np.zeros((3, 1)), np.zeros((1, 4))
    u, small, each = np.ones(4), np.zeros(4), np.zeros(4)
    for g in gradients:
        weight.grad, vector.grad = torch.tensor(g, dtype=torch.float32), torch.tensor(g[0], dtype=torch.float32)
        optimizer.step()
        nu = (beta or 1.0) * np.minimum(rows, columns) + (1 - beta) * g * g
        rows, columns = (
            np.maximum(old * (beta > 0), nu.max(axis, keepdims=True)) for old, axis in ((rows, 1), (columns, 0))
        )
        buffer = momentum * buffer + (1 - momentum) * g / np.sqrt(nu + 1e-30)
        w = w - 0.1 * buffer
        nu = (beta or 1.0) * each + (1 - beta) * g[0] ** 2
        each = np.maximum(each * (beta > 0), nu)
        small = momentum * small + (1 - momentum) * g[0] / np.sqrt(nu + 1e-30)
        u = u - 0.1 * small
    np.testing.assert_allclose(weight.detach().numpy(), w, rtol=1e-5)
    np.testing.assert_allclose(vector.detach().numpy(), u, rtol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_madgrad(momentum):
    w, s, v, start = np.ones(4), np.zeros(4), np.zeros(4), np.ones(4)
    for k, g in enumerate(GRADIENTS):
        rate = 0.1 + 1e-6
        w = w * (1 - rate * 0.01)
        x0 = start if momentum else w + s / (np.cbrt(v) + 1e-6)
        s, v = s + rate * np.sqrt(k + 1) * g, v + rate * np.sqrt(k + 1) * g * g
        w = momentum * w + (1 - momentum) * (x0 - s / (np.cbrt(v) + 1e-6))
    np.testing.assert_allclose(run("madgrad_wd", {"momentum": momentum, "eps": 1e-6}, 0.01), w, rtol=2e-5)


def test_onebit_adam_freezes_second_moments():
    w, m, v = np.ones(4), np.zeros(4), np.zeros(4)
    for t, g in enumerate(GRADIENTS):
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g if t < 3 else v
        w = w * (1 - 0.1 * 0.01) - 0.1 * m / (np.sqrt(v) + 1e-8)
    params = optimizer_params("onebitadam", {"params": {"betas": [0.9, 0.95], "freeze_step": 3}})
    np.testing.assert_allclose(run("OneBitAdam", params, 0.01), w, rtol=2e-6)


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


def test_embeddings_decay_unless_told_otherwise_and_rules_win_in_order():
    state = ParallelState.single()
    table = parameter(ParamSpec(shape=(5, 3), init=zeros, kind="embedding", name="0.word_embeddings.weight"), state)
    head = parameter(ParamSpec(shape=(5, 3), init=zeros, kind="embedding", name="5.final_linear.weight"), state)
    bias = parameter(ParamSpec(shape=(3,), init=zeros, name="2.mlp.bias"), state)
    rules = parse_rules(
        [
            {"match": ["2.*", "5.*"], "lr_mult": 0.25, "weight_decay": "1e-2"},
            {"match": "*.bias", "weight_decay": 0.5},
            {"match": "0.*", "freeze": True},
            {"match": "0.word*", "freeze": False},
        ]
    )
    freeze_parameters([table, head, bias], rules)
    groups = parameter_groups([table, head, bias], weight_decay=0.1, decay_embeddings=False, rules=rules)
    found = {id(p): (g["weight_decay"], g["lr_mult"]) for g in groups for p in g["params"]}
    assert found == {id(table): (0.0, 1.0), id(head): (0.01, 0.25), id(bias): (0.5, 0.25)}
    freeze_parameters([table], rules[:3])
    assert not table.requires_grad and parameter_groups([table], weight_decay=0.1) == []
