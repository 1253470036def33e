"""The guide's feed-forward that adds to the loss: its formula, its layouts, and what its balance loss does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.layers.carry import Context
from megatron.layers.parts import MLPS
from megatron.model.gpt import gpt_layers
from megatron.model.sequential import SequentialModel
from megatron.mpu import initial_weights, sharding
from megatron.mpu.state import ParallelState
from megatron.objectives import OBJECTIVES
from megatron.plugins import load_plugins
from tests.distributed import run_distributed
from tests.model.networks import VOCAB, batch, tiny
from tests.plugins.helpers import write_switch
from tests.training.tiny import NEOX, Layout, build, step_batch

pytestmark = pytest.mark.cpu

STEPS = 20
STATE = ParallelState.single()
FAST = {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8}}


def keys(balance: float, **changes: Any) -> dict[str, Any]:
    switch = {"experts": 4, "balance": balance}
    return {**NEOX, "mlp_config": ["dense", "switch"], "plugin_options": {"switch": switch}, **changes}


def load_switch(folder: Path) -> str:
    path = str(write_switch(folder))
    load_plugins([path], lambda name: "a test")
    return path


@torch.no_grad()
def test_output_and_loss_are_the_formulas(tmp_path: Path) -> None:
    load_switch(tmp_path)
    layer = MLPS["switch"](tiny(**keys(0.5)), STATE)
    sharding.bind(layer, 3)
    initial_weights.initialize(layer, 1, STATE)
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(2))
    y, loss = layer(x, Context(torch.arange(6).expand(2, 6)))
    expected_loss = 0.0
    for row in range(2):
        mean, used = torch.zeros(4), [0] * 4
        for token in range(6 * row, 6 * row + 6):
            scores = (layer.router @ x[token]).softmax(0)
            best = int(scores.argmax())
            expected = scores[best] * ((x[token] @ layer.up[best]).relu() @ layer.down[best])
            torch.testing.assert_close(y[token], expected, rtol=1e-5, atol=1e-6)
            mean, used[best] = mean + scores / 6, used[best] + 1
        expected_loss += 0.5 * 4 * sum(float(mean[e]) * used[e] / 6 for e in range(4)) / 2
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)


def train(rank: int, world: int, path: str, balance: float, layout: Layout) -> dict[str, list[float]]:
    """Loss and gradient norm of each step, the same on all ranks; the share of tokens that each expert gets in the last
    one, where the layer is."""
    load_plugins([path], lambda name: "a test")
    engine, args, lr = build(rank, keys(balance, optimizer=FAST), layout)
    counts = torch.zeros(4)

    def count(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]  # the tensor-parallel region is entered already or not split without sequence parallelism
        counts.add_(torch.bincount((x @ layer.router.t()).argmax(-1), minlength=4))

    switch = [layer for layer in engine.module.modules() if isinstance(layer, MLPS["switch"])]
    curve: dict[str, list[float]] = {"loss": [], "grad_norm": [], "share": []}
    for step in range(STEPS):
        if step == STEPS - 1 and switch:
            switch[0].register_forward_pre_hook(count)
        out = engine.train_batch(step_batch(step, args, engine.state), lr(step))
        curve["loss"].append(float(out.loss))
        curve["grad_norm"].append(float(out.grad_norm))
    if switch:
        curve["share"] = (counts / counts.sum()).tolist()
    return curve


def test_the_balance_loss_acts_on_every_layout(tmp_path: Path) -> None:
    path = load_switch(tmp_path)
    free = train_alone(path, 0.0)
    balanced = train_alone(path, 1.0)
    assert max(balanced["share"]) < 0.35 < 0.5 < max(free["share"])
    for layout in (Layout(tp=2), Layout(pp=2), Layout(micro=1)):
        for curve in run_distributed(train, layout.world, path, 1.0, layout, timeout=120):
            assert curve["loss"] == pytest.approx(balanced["loss"], rel=1e-4)
            assert curve["grad_norm"] == pytest.approx(balanced["grad_norm"], rel=1e-3)


def train_alone(path: str, balance: float) -> dict[str, list[float]]:
    return run_distributed(train, 1, path, balance, Layout(micro=8), timeout=120)[0]


def test_a_loss_that_was_not_announced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_switch(tmp_path)
    monkeypatch.setattr(MLPS["switch"], "adds_loss", staticmethod(lambda model: False))
    model = tiny(mlp_config=["dense", "switch"], expansion_factor=1)
    layers = gpt_layers(model, vocab_size=VOCAB, padded_vocab_size=VOCAB, state=STATE)
    network = SequentialModel(layers, OBJECTIVES["normal"](), 0, STATE)
    tokens, positions, _ = batch()
    with pytest.raises(UserError, match="adds_loss"):
        network((tokens, positions))
    network.eval()((tokens, positions))
