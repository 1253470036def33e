"""Mixtures of experts train alike at any layout: loss, norm, evaluation, load and the biases that balance it.

Mistakes on purpose are in tests/mutants.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.layers.moe.balancing import moe_layers, move_biases
from megatron.mpu.sharding import named_parameters, unshard
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.distributed import run_distributed
from tests.model import networks
from tests.training.models import LLAMA, NEOX
from tests.training.tiny import Layout, build, step_batch

pytestmark = pytest.mark.cpu

STEPS = 8
MOE: dict[str, Any] = {
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_router_type": "topk",
    "moe_intermediate_size": 24,
    "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
    "moe_bias_balancing_rate": 0.003,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        **LLAMA, **MOE, "moe_layers": [1], "moe_shared_expert_size": 16, "moe_shared_expert_gate": True,
        "moe_expert_bias": True, "moe_normalize_topk": True,
    },
    "neox": {
        **NEOX, **MOE, "moe_layers": [0], "moe_router_score": "sigmoid", "moe_routed_scaling": 1.5,
        "moe_capacity_factor": 1.0, "moe_expert_bias": True,
    },
    "tied": {
        **NEOX, **MOE, "gpt_j_tied": True, "no_weight_tying": False, "moe_shared_expert_size": 16,
        "checkpoint_activations": True,
    },
}  # fmt: skip
MODELS["heads"] = {**MODELS["llama"], "num_attention_heads": 8, "num_kv_heads": 4}
MODELS["hybrid"] = {
    **MODELS["llama"], "attention_config": ["mamba2", "global"], "mamba_d_state": 8, "mamba_head_dim": 8,
    "moe_capacity_factor": 1.0,
}  # fmt: skip
MODELS["deep"] = {**MODELS["neox"], "num_layers": 4, "moe_layers": [0, 1, 3]}
LAYOUTS = [
    Layout(micro=1),
    Layout(tp=2),
    Layout(tp=2, micro=1, sequence_parallel=True),
    Layout(pp=2),
    Layout(dp=2, zero=1),
]
MIXED = [
    ("llama", Layout(pp=2, tp=2, sequence_parallel=True, micro=1)),
    ("neox", Layout(pp=2, dp=2, zero=1)),
    ("tied", Layout(dp=2, tp=2, zero=2)),
    ("heads", Layout(tp=4)),
    ("deep", Layout(pp=2)),
    ("hybrid", Layout(pp=2, tp=2, micro=1, sequence_parallel=True)),
]


def train(rank: int, world: int, keys: dict[str, Any], layout: Layout, steps: int) -> dict[str, list[Any]]:
    """As tests.training.tiny.train, with the biases moved after each step; of what the last stage's ranks saw."""
    engine, args, lr = build(rank, keys, layout)
    layers = moe_layers(engine.module)
    curve: dict[str, list[Any]] = {"loss": [], "grad_norm": [], "chosen": []}
    for step in range(steps):
        out = engine.train_batch(step_batch(step, args, engine.state), lr(step))
        curve["loss"].append(float(out.loss))
        curve["grad_norm"].append(float(out.grad_norm))
        sums = torch.stack([layer.load.take() for layer in layers.values()]) if layers else torch.zeros(0, 8)
        if layers and (group := engine.state.group("data")) is not None:
            dist.all_reduce(sums, group=group)
        move_biases(list(layers.values()), sums[:, :-4], args.model.moe_bias_balancing_rate)
        curve["chosen"].append({block: row.tolist() for block, row in zip(layers, sums, strict=True)})
    evaluated = engine.eval_batch(step_batch(99, args, engine.state))
    curve["eval"] = [evaluated.loss]
    curve["bias"] = [(block, layer.router.expert_bias.tolist()) for block, layer in layers.items()]
    return curve


@functools.cache
def reference(model: str) -> dict[str, list[Any]]:
    return run_distributed(train, 1, MODELS[model], Layout(micro=8), STEPS)[0]


def assert_same(model: str, curves: list[dict[str, list[Any]]]) -> None:
    ours = reference(model)
    biases = dict(ours["bias"])
    for curve in curves:
        assert curve["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        assert curve["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-5)
        assert curve["eval"] == pytest.approx(ours["eval"], rel=1e-5)
        for step, chosen in enumerate(curve["chosen"]):
            for block, row in chosen.items():
                expected = ours["chosen"][step][block]
                assert row[:5] == expected[:5]  # assignments, dropped
                mean = [x / row[-1] for x in row[5:7]]  # losses of a micro-batch
                assert mean == pytest.approx([x / expected[-1] for x in expected[5:7]], rel=1e-5)
        for block, bias in curve["bias"]:
            assert bias == pytest.approx(biases[block], abs=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
@pytest.mark.parametrize("model", ["llama", "neox", "tied"])
def test_same_curve(model: str, layout: Layout) -> None:
    assert_same(model, run_distributed(train, layout.world, MODELS[model], layout, STEPS, timeout=120))


@pytest.mark.parametrize(("model", "layout"), MIXED, ids=lambda x: getattr(x, "name", x))
def test_same_curve_of_mixed_layouts(model: str, layout: Layout) -> None:
    assert_same(model, run_distributed(train, layout.world, MODELS[model], layout, STEPS, timeout=120))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_noise_in_the_router_is_one_for_all_tensor_parallel_ranks(sequence_parallel: bool) -> None:
    """Each routes all tokens, so other noise would send a token to other experts on each rank."""
    keys = {**MODELS["llama"], "moe_jitter_eps": 0.2}
    layout = Layout(tp=2, micro=8, sequence_parallel=sequence_parallel)
    alone = run_distributed(train, 1, keys, Layout(micro=8), STEPS)[0]
    assert alone["loss"] != pytest.approx(reference("llama")["loss"], rel=1e-5)
    for curve in run_distributed(train, 2, keys, layout, STEPS, timeout=120):
        for what in ("loss", "grad_norm"):
            assert curve[what] == pytest.approx(alone[what], rel=1e-5)


def test_the_reference_learns_drops_and_balances() -> None:
    for model in MODELS:
        curve = reference(model)
        assert curve["loss"][-1] < curve["loss"][0]
        assert any(any(bias) for _, bias in curve["bias"])
    assert all(row[4] > 0 for chosen in reference("neox")["chosen"] for row in chosen.values())


def test_zero_3_trains_alike() -> None:
    """Without biases that move, which its partitions do not allow."""
    keys = {**MODELS["llama"], "moe_bias_balancing_rate": 0.0}
    curves = [
        run_distributed(_without_biases, layout.world, keys, layout, timeout=120)[0]
        for layout in (Layout(micro=8), Layout(dp=2, zero=3))
    ]
    for key in ("loss", "grad_norm"):
        assert curves[1][key] == pytest.approx(curves[0][key], rel=1e-5)


def _without_biases(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> dict[str, list[float]]:
    from tests.training.tiny import train as plain

    return plain(rank, world, keys, layout, STEPS)


def test_bf16_in_a_pipeline_is_bf16_without() -> None:
    """fp32 accumulation of the gradients of both outputs of a stage; the biases stay fp32."""
    keys = {**MODELS["llama"], "precision": "bfloat16"}
    one, two = (
        run_distributed(train, layout.world, keys, layout, STEPS, timeout=120)
        for layout in (Layout(micro=2, zero=1), Layout(pp=2, zero=1))
    )
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=2e-3)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=2e-2)
    (bias,) = [torch.tensor(bias) for _, bias in two[-1]["bias"]]
    assert not torch.equal(bias, bias.bfloat16().float())


# ---- every gradient


GRADIENTS: list[dict[str, Any]] = [
    {**MOE, "activation": "swiglu", "moe_shared_expert_size": 16, "moe_shared_expert_gate": True},
    {**MOE, "gpt_j_residual": True, "moe_expert_bias": True, "moe_capacity_factor": 1.0, "moe_router_score": "sigmoid"},
    {**MOE, "gpt_j_residual": True, "gpt_j_tied": True, "activation": "swiglu", "moe_normalize_topk": True},
    {"moe_num_experts": 4, "moe_top_k": 2, "moe_z_loss_coeff": 0.1},  # sinkhorn
]
Gradients = list[dict[str, Tensor]]


def _gradients(state: ParallelState) -> Gradients:
    found = []
    for changes in GRADIENTS:
        network = networks.build(networks.tiny(init_method_std=0.2, **changes), state, padding=80)
        tokens, positions, targets = networks.batch()
        network((tokens, positions), (targets, (positions % 3 > 0).float(), torch.tensor([0.05])))[0].backward()
        found.append({name: p.grad for name, p in named_parameters(network) if p.requires_grad})
    return found


def _rank_gradients(rank: int, world: int, sequence_parallel: bool) -> Gradients:
    topology = Topology({"pipe": 1, "data": 1, "model": world})
    return _gradients(ParallelState.build(topology, rank, torch.device("cpu"), sequence_parallel))


def _errors(ranks: list[Gradients]) -> dict[str, float]:
    """Parameter -> largest error over the form's and rank's, relative to its largest gradient."""
    errors: dict[str, float] = {}
    for i, (changes, whole) in enumerate(zip(GRADIENTS, _gradients(ParallelState.single()), strict=True)):
        specs = {name: p.spec for name, p in named_parameters(networks.build(networks.tiny(**changes), padding=80))}
        for name, expected in whole.items():
            expected = expected.narrow(0, 0, specs[name].shape[0])
            mine = unshard([rank[i][name] for rank in ranks], specs[name])
            error = float((mine - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
            errors[name] = max(error, errors.get(name, 0.0))
    return errors


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_gradient_under_tensor_parallel(sequence_parallel: bool) -> None:
    errors = _errors(run_distributed(_rank_gradients, 2, sequence_parallel, timeout=120))
    assert len(errors) > 20 and max(errors.values()) < 1e-4, errors
